r"""Plane shapes as signed distances: negative inside, positive outside, in the unit of the coordinates.

A shape is evaluated for all pixels at once, and its edge is smoothed over one pixel, so nothing has to be supersampled.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# one number a pixel, of any shape; single precision, though the stubs of NumPy do not follow it through products
Plane = NDArray[np.floating[Any]]
Point = tuple[float, float]


def circle(u: Plane, v: Plane, centre: Point, radius: float) -> Plane:
    """Exact distance to a circle.

    Example:
        >>> circle(np.float32([0, 2]), np.float32([0, 0]), (0, 0), 1.5).tolist()
        [-1.5, 0.5]
    """
    return _length(u - centre[0], v - centre[1]) - radius


def ellipse(u: Plane, v: Plane, centre: Point, radii: Point, angle: float = 0.0) -> Plane:
    r"""Distance to an ellipse, exact on its edge and to the first order beside it.

    .. math:: d = \frac{k_0 (k_0 - 1)}{k_1}, \qquad k_0 = \lVert (x/r_x,\; y/r_y) \rVert, \quad
       k_1 = \lVert (x/r_x^2,\; y/r_y^2) \rVert

    Args:
        angle: of the first axis, in radians, from u towards v.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    du, dv = u - centre[0], v - centre[1]
    x = du * (cos / radii[0]) + dv * (sin / radii[0])
    y = dv * (cos / radii[1]) - du * (sin / radii[1])
    k0 = _length(x, y)
    # in the centre both lengths vanish, and k1 with them
    k1 = np.maximum(_length(x / radii[0], y / radii[1]), 1e-6)
    return k0 * (k0 - 1) / k1


def capsule(u: Plane, v: Plane, start: Point, end: Point, radius: float) -> Plane:
    """Exact distance to a segment with round ends."""
    au, av = end[0] - start[0], end[1] - start[1]
    square = au * au + av * av
    du, dv = u - start[0], v - start[1]
    t = np.clip(du * (au / square) + dv * (av / square), 0, 1)
    return _length(du - t * au, dv - t * av) - radius


def polygon(u: Plane, v: Plane, corners: Sequence[Point]) -> Plane:
    """Distance to a convex polygon, exact inside and along its edges; the corners go round as from u to v.

    Example:
        >>> square = [(0, 0), (1, 0), (1, 1), (0, 1)]
        >>> polygon(np.float32([0.5, 3]), np.float32([0.5, 0.5]), square).tolist()
        [-0.5, 2.0]
    """
    edges = []
    for (u0, v0), (u1, v1) in zip(corners, [*corners[1:], corners[0]], strict=True):
        length = math.hypot(u1 - u0, v1 - v0)
        nu, nv = (v1 - v0) / length, (u0 - u1) / length
        edges.append(u * nu + v * nv - (nu * u0 + nv * v0))
    return common(edges)


def union(shapes: Sequence[Plane]) -> Plane:
    """Distance to the union of shapes."""
    result = shapes[0]
    for shape in shapes[1:]:
        result = np.minimum(result, shape)
    return result


def common(shapes: Sequence[Plane]) -> Plane:
    """Distance to what shapes have in common."""
    result = shapes[0]
    for shape in shapes[1:]:
        result = np.maximum(result, shape)
    return result


def smooth_union(a: Plane, b: Plane, blend: float) -> Plane:
    """Distance to the union of two shapes, with the crease between them filled over the length ``blend``."""
    overlap = np.maximum(blend - np.abs(a - b), 0)
    return np.minimum(a, b) - overlap * overlap * (0.25 / blend)


def coverage(distance: Plane, pixel: float) -> Plane:
    """Share of each pixel that a shape covers, 0 to 1, for pixels of the width ``pixel``; exactly 0 or 1 off the edge."""
    return np.clip(0.5 - distance * (1 / pixel), 0, 1)


def _length(x: Plane, y: Plane) -> Plane:
    length: Plane = np.sqrt(x * x + y * y)
    return length
