"""Ensembles as programs that need no dissensus: ``torch.export`` and ONNX, with predictions and uncertainty.

`program` and `onnx` take an `Ensemble`, a masked network, heads on a shared trunk, or one network (a member, a soup, a
sliced mask). What they return has named outputs.

For classification (logits of classes; ``loss="cross_entropy"`` and the like):

=========================  ==========  ==========================================================================
``probs``                  ``[B, C]``  the pooled prediction
``entropy``                ``[B]``     entropy of the mean probabilities: all uncertainty
``mutual_information``     ``[B]``     what members disagree about: the epistemic part
``aleatoric``              ``[B]``     mean of the members' entropies; the three add up, whatever the pool is
=========================  ==========  ==========================================================================

With ``loss="bce"`` every label has all four, ``[B, C]``. For regression (``loss="squared_error"`` and the like):

=========================  ==========  ==========================================================================
``mean``                   ``[B, C]``  the pooled prediction
``variance``, ``std``      ``[B, C]``  of the members' outputs, with divisor M: the epistemic part; 0 for one member
=========================  ==========  ==========================================================================

With ``loss="gaussian_nll"`` and ``"poisson"``, ``variance`` is that of the target, and its parts follow as
``aleatoric`` and ``epistemic`` (variances too). With ``loss="quantile"`` there are ``quantiles`` ``[B, D, Q]`` in
rising order, ``width`` ``[B, D]`` between the outermost, and ``variance`` ``[B, D, Q]`` of the members' quantiles.
"""

from dissensus.export.files import onnx
from dissensus.export.programs import program

__all__ = ["onnx", "program"]
