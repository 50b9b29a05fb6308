"""The learned scaling factors of the ablation (Table 7); the others are functions of the spectrum without parameters."""

from torch import Tensor, nn

from eigengrain.functional import triu_vector

FACTORS = ("qs", "q", "s", "constant", "mlp-eigenvalues", "mlp-matrix")


def _mlp(in_features: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1), nn.ReLU())


def _apply(mlp: nn.Sequential, x: Tensor) -> Tensor:
    out: Tensor = mlp(x.to(mlp[0].weight.dtype))  # type: ignore[arg-type]  # replicas of DataParallel list no parameters
    return out.squeeze(-1) + 1


class EigenvalueFactor(nn.Module):
    r""":math:`\mathrm{ReLU}(\mathrm{MLP}(\Lambda^{1/2})) + 1` from descending eigenvalues (B, d), shape (B,).

    The paper gives no size for the network: one hidden layer, as wide as the input.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.mlp = _mlp(channels, channels)

    def forward(self, eigenvalues: Tensor) -> Tensor:
        # the root of a zero eigenvalue has an infinite slope; 1e-12 of the largest is below anything the network could use
        floor = 1e-12 * eigenvalues[:, :1].detach() + 1e-24
        roots = (eigenvalues.clamp_min(0) + floor).sqrt()
        return _apply(self.mlp, roots)


class MatrixFactor(nn.Module):
    r""":math:`\mathrm{ReLU}(\mathrm{MLP}(Q)) + 1` from the upper triangle of Q (B, d, d), shape (B,)."""

    def __init__(self, channels: int):
        super().__init__()
        self.mlp = _mlp(channels * (channels + 1) // 2, channels)

    def forward(self, q: Tensor) -> Tensor:
        return _apply(self.mlp, triu_vector(q))
