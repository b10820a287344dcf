"""Ready-made networks. Each is a function that returns an ordinary ``nn.Module``."""

from dissensus.nets.cnn import cnn, vanilla_cnn
from dissensus.nets.mlp import mlp
from dissensus.nets.mobilenet import mobilenet_v2
from dissensus.nets.resnet import resnet18, resnet20, resnet32, resnet34
from dissensus.nets.tabm import tabm
from dissensus.nets.vgg import vgg

__all__ = ["cnn", "mlp", "mobilenet_v2", "resnet18", "resnet20", "resnet32", "resnet34", "tabm", "vanilla_cnn", "vgg"]
