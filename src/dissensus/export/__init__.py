"""Ensembles as programs that need no dissensus: ``torch.export`` and ONNX, with predictions and uncertainty.

`program` and `onnx` take an `Ensemble`, a masked network, heads on a shared trunk, or one network (a member, a soup, a
sliced mask). What they return has named outputs.

For classification:

=========================  ==========  ==========================================================================
``probs``                  ``[B, C]``  the pooled prediction
``entropy``                ``[B]``     entropy of the mean probabilities: all uncertainty
``mutual_information``     ``[B]``     what members disagree about: the epistemic part
``aleatoric``              ``[B]``     mean of the members' entropies; the three add up, whatever the pool is
=========================  ==========  ==========================================================================

For regression:

=========================  ==========  ==========================================================================
``mean``                   ``[B, C]``  the pooled prediction
``variance``, ``std``      ``[B, C]``  of the members' outputs, with divisor M: the epistemic part; 0 for one member
=========================  ==========  ==========================================================================
"""

from dissensus.export.files import onnx
from dissensus.export.programs import program

__all__ = ["onnx", "program"]
