"""Slow, obvious float64 versions of everything, from the paper and docs/method.md; nothing of frozencore is used here.

NumPy, full SVDs, loops over tokens. Letters as in the paper: G, A, D, T, P, Q, R.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float64]


# ---------------------------------------------------------------------------------------------------- moments


@dataclass
class ReferenceMoments:
    """Sums over counted tokens, made one token at a time."""

    num_tokens: int
    cross: Array
    input_square: Array
    error_square: Array
    input_outer: Array
    error_outer: Array
    input_total: Array
    output_outer: Array
    output_total: Array


@dataclass
class _Seen:
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def completion_loss(logits: torch.Tensor, ids: list[int], num_prompt: int, token_sum: bool = False) -> torch.Tensor:
    """Minus the mean (or summed) log-probability of the completion tokens of one example, by the definition."""
    terms = []
    for t in range(1, len(ids)):
        if t >= num_prompt:
            terms.append(-torch.log_softmax(logits[t - 1].double(), dim=0)[ids[t]])
    total = torch.stack(terms).sum()
    return total if token_sum else total / len(terms)


def reference_moments(
    model: nn.Module,
    examples: Iterable[tuple[list[int], int]],
    layer_names: list[str],
    *,
    token_sum: bool = False,
    counts: Callable[[int, int, int, Array], bool] = lambda t, length, num_prompt, delta: True,
) -> dict[str, ReferenceMoments]:
    """Moments from a float64 copy of the model, one unpadded example at a time and one token at a time.

    Args:
        counts: Whether token t of an example of that length and prompt, with that output error, counts.
    """
    model = copy.deepcopy(model).double().eval()
    sums: dict[str, ReferenceMoments] = {}
    for ids, num_prompt in examples:
        logits, seen = _run(model, list(ids), layer_names)
        completion_loss(logits, list(ids), num_prompt, token_sum).backward()
        for name in layer_names:
            for x, y in zip(seen[name].inputs, seen[name].outputs, strict=True):
                for t in range(len(ids)):
                    delta = y.grad[0, t].numpy()
                    if counts(t, len(ids), num_prompt, delta):
                        add_token(sums, name, x[0, t].detach().numpy(), delta, y[0, t].detach().numpy())
    return sums


def _run(model: nn.Module, ids: list[int], layer_names: list[str]) -> tuple[torch.Tensor, dict[str, _Seen]]:
    """Logits of one example, and what its layers saw."""
    seen = {name: _Seen() for name in layer_names}
    handles = [model.get_submodule(name).register_forward_hook(_remember(seen[name])) for name in layer_names]
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    for handle in handles:
        handle.remove()
    return logits, seen


def _remember(seen: _Seen) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        y.retain_grad()
        seen.inputs.append(args[0])
        seen.outputs.append(y)

    return hook


def add_token(sums: dict[str, ReferenceMoments], name: str, x: Array, delta: Array, y: Array) -> None:
    """Add one token's input, output error and output to the sums of a layer."""
    new = ReferenceMoments(
        num_tokens=1,
        cross=np.outer(delta, x),
        input_square=x * x,
        error_square=delta * delta,
        input_outer=np.outer(x, x),
        error_outer=np.outer(delta, delta),
        input_total=x.copy(),
        output_outer=np.outer(y, y),
        output_total=y.copy(),
    )
    if name not in sums:
        sums[name] = new
        return
    for key in vars(new):
        setattr(sums[name], key, getattr(sums[name], key) + getattr(new, key))


# ---------------------------------------------------------------------------------------------- linear algebra


def numpy_of(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().cpu().numpy()


def svd(M: Array) -> tuple[Array, Array, Array]:
    """U, σ (descending), V."""
    U, S, Vh = np.linalg.svd(M, full_matrices=False)
    return U, S, Vh.T


def projector(X: Array) -> Array:
    """Orthogonal projector on the columns of X (full column rank)."""
    U, _, _ = svd(X)
    return U @ U.T


def span_distance(X: Array, Y: Array) -> float:
    """Largest sine of a principal angle between two spans of the same dimension."""
    return float(np.linalg.norm(projector(X) - projector(Y), 2))


def principal_cosines(X: Array, Y: Array) -> Array:
    return np.linalg.svd(np.linalg.qr(X)[0].T @ np.linalg.qr(Y)[0], compute_uv=False)


def power(A: Array, exponent: float) -> Array:
    """A power of a symmetric positive definite matrix through its eigenvectors."""
    eigenvalues, vectors = np.linalg.eigh(A)
    return (vectors * eigenvalues**exponent) @ vectors.T


def truncated(M: Array, rank: int) -> Array:
    """[M]_r, the best approximation of rank r."""
    U, S, V = svd(M)
    return U[:, :rank] @ np.diag(S[:rank]) @ V[:, :rank].T


# ------------------------------------------------------------------------------------------------ Fisher metric


def damped_matrix(second_moment: Array, c: float, shrinkage: float = 0.0) -> Array:
    """``A + c·mean(diag A)·I`` as a matrix, with the off-diagonal shrunk by λ; a vector stands for its diagonal."""
    matrix = np.diag(second_moment) if second_moment.ndim == 1 else second_moment
    k = matrix.shape[0]
    result = np.zeros((k, k))
    mean = sum(matrix[i, i] for i in range(k)) / k
    for i in range(k):
        for j in range(k):
            result[i, j] = matrix[i, i] + c * mean if i == j else (1 - shrinkage) * matrix[i, j]
    return result


def whitened(G: Array, A: Array, D: Array) -> Array:
    """T = D^-½ G A^-½."""
    return power(D, -0.5) @ G @ power(A, -0.5)


def objective(G: Array, A: Array, D: Array, delta_W: Array, eta: float) -> float:
    """Equation 1 of the paper."""
    inner = float(np.sum(G * delta_W))
    return inner + float(np.linalg.norm(power(D, 0.5) @ delta_W @ power(A, 0.5)) ** 2) / (2 * eta)


def captured(G: Array, A: Array, D: Array, P: Array, Q: Array) -> float:
    """J = ‖(PᵀDP)^-½ PᵀGQ (QᵀAQ)^-½‖²_F."""
    return float(np.linalg.norm(power(P.T @ D @ P, -0.5) @ P.T @ G @ Q @ power(Q.T @ A @ Q, -0.5)) ** 2)


def best_core(G: Array, A: Array, D: Array, P: Array, Q: Array, eta: float, s: float) -> Array:
    """The core that minimises equation 1 over s·P R Qᵀ, as a dense least-squares problem in vec(R).

    Up to a constant, eq. 1 is ``1/(2η) ‖D^½ ΔW A^½ + η T‖²``.
    """
    r = P.shape[1]
    left, right = power(D, 0.5) @ P, power(A, 0.5) @ Q
    columns = []
    for i in range(r):
        for j in range(r):
            columns.append(s * np.outer(left[:, i], right[:, j]).ravel())
    solution = np.linalg.lstsq(np.stack(columns, axis=1), -eta * whitened(G, A, D).ravel(), rcond=None)[0]
    return solution.reshape(r, r)


# ------------------------------------------------------------------------------------------------- constructors


@dataclass
class Evidence:
    """Means of one layer in float64 (A and D dense), and its weight."""

    G: Array
    A: Array
    D: Array
    W: Array
    x_mean: Array
    Y: Array
    y_mean: Array


def top_eigenspace(A: Array, rank: int) -> Array:
    eigenvalues, vectors = np.linalg.eigh(A)
    return vectors[:, np.argsort(-eigenvalues)[:rank]]


def fcca_factors(
    e: Evidence,
    rank: int,
    *,
    c_input: float = 1e-3,
    c_output: float = 1e-3,
    sides: str = "both",
    dense: bool = False,
    shrinkage: float = 0.0,
) -> tuple[Array, Array]:
    """P₀ = D^-½ U_r and Q₀ = A^-½ V_r (paper, section 3.2)."""
    A = damped_matrix(e.A if dense else np.diag(e.A), c_input, shrinkage)
    D = damped_matrix(e.D if dense else np.diag(e.D), c_output, shrinkage)
    if sides not in ("both", "input"):
        A = np.eye(len(A))
    if sides not in ("both", "output"):
        D = np.eye(len(D))
    U, _, V = svd(whitened(e.G, A, D))
    return power(D, -0.5) @ U[:, :rank], power(A, -0.5) @ V[:, :rank]


def rawgrad_factors(e: Evidence, rank: int) -> tuple[Array, Array]:
    U, _, V = svd(e.G)
    return U[:, :rank], V[:, :rank]


def signgrad_factors(e: Evidence, rank: int) -> tuple[Array, Array]:
    U, _, V = svd(np.sign(e.G))
    return U[:, :rank], V[:, :rank]


def filora_factors(e: Evidence, rank: int) -> tuple[Array, Array]:
    return top_eigenspace(e.D, rank), top_eigenspace(e.A, rank)


def lora_xs_factors(e: Evidence, rank: int) -> tuple[Array, Array]:
    U, _, V = svd(e.W)
    return U[:, :rank], V[:, :rank]


def milora_factors(e: Evidence, rank: int) -> tuple[Array, Array]:
    U, _, V = svd(e.W)
    return U[:, -rank:], V[:, -rank:]


def eva_factors(e: Evidence, rank: int, *, center: bool = False, output_pca: bool = False) -> tuple[Array, Array]:
    covariance = e.A - np.outer(e.x_mean, e.x_mean) if center else e.A
    Q = top_eigenspace(covariance, rank)
    if not output_pca:
        return e.W @ Q, Q
    outputs = e.Y - np.outer(e.y_mean, e.y_mean) if center else e.Y
    return top_eigenspace(outputs, rank), Q


REFERENCE_FACTORS: dict[str, Callable[[Evidence, int], tuple[Array, Array]]] = {
    "fcca": fcca_factors,
    "rawgrad": rawgrad_factors,
    "signgrad": signgrad_factors,
    "filora": filora_factors,
    "lora_xs": lora_xs_factors,
    "milora": milora_factors,
    "eva": eva_factors,
}
