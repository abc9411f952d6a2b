"""What u already tells about the gradient inside a trunk with a residual stream, without a backward pass.

In such a trunk, x_{i+1} = x_i + w_i, every write w_i reaches the top of the stream x_L along the identity path,
whatever else it does on the way. So r = dL/dx_L, which u gives in closed form, is the exact gradient of every write
along that path; a :class:`Feedback` predicts the whole gradient at a write from it.
"""

from splitfg.feedback._maps import Feedback, Identity, LearnedFeedback, MeanJacobian, RandomMaps

__all__ = ["Feedback", "Identity", "LearnedFeedback", "MeanJacobian", "RandomMaps"]
