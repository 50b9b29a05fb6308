"""Render a scene and a species to pixels, with masks of the bird and of the parts that distinguish the species.

Shapes are signed distances: negative inside, positive outside, in the unit of the coordinates. They are evaluated for all
pixels at once, and their edges are smoothed over one pixel, so that no supersampling is needed.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengrain.data.plumage.scene import Marks, Scene

# one number per pixel, of any shape; single precision, which NumPy's type stubs lose in products
Plane = NDArray[np.floating[Any]]
Paint = NDArray[np.floating[Any]]  # three numbers per pixel, (3, ...)
Mask = NDArray[np.bool_]  # (H, W)
Point = tuple[float, float]

# Coordinates of the bird: it looks along +u, v points down, and its length from bill to tail is about 1.
_HEAD, _EYE = (0.275, -0.185), (0.318, -0.205)
_BILL = ((0.372, -0.240), (0.520, -0.172), (0.366, -0.138))
_LEGS = (((0.030, 0.16), (0.055, 0.32)), ((-0.035, 0.16), (-0.020, 0.32)))
_BARS = (((0.050, -0.070), (-0.035, 0.085)), ((-0.065, -0.055), (-0.140, 0.080)))
_SPOTS = ((0.190, 0.005), (0.255, 0.030), (0.195, 0.075), (0.135, 0.145), (0.205, 0.140), (0.125, 0.075))
_TURN = -0.42  # angle of the body's axis


class Drawing(NamedTuple):
    """An RGB image (H, W, 3), the mask of the bird, and the mask of its pixels that depend on the species."""

    image: NDArray[np.uint8]
    bird: Mask
    parts: Mask


def render(scene: Scene, marks: Marks, size: int) -> Drawing:
    """Draw one bird; every step works on each pixel separately, so that a mark changes only its own pixels."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = axis[None, :], axis[:, None]
    picture = _background(scene, x, y, 1 / size)

    # pixels in the bird's coordinates; a mirrored bird looks along -u of the image
    cos, sin = math.cos(scene.angle) / scene.length, math.sin(scene.angle) / scene.length
    dx, dy = (x - scene.centre[0]) * (-1 if scene.flip else 1), y - scene.centre[1]
    u, v = dx * cos + dy * sin, dy * cos - dx * sin
    pixel = 1 / (size * scene.length)

    _perch(picture, scene, u, v, pixel)
    cover = coverage(union(_outline(scene, u, v)), pixel)
    bird = cover > 0
    parts = np.zeros_like(bird)
    # from here on only the pixels of the bird, a fifth of the image
    paint, parts[bird] = _plumage(scene, marks, u[bird], v[bird], pixel)
    behind = picture[:, bird]
    picture[:, bird] = behind + cover[bird] * (paint - behind)

    picture *= scene.exposure[:, None, None]
    grain = np.random.Generator(np.random.PCG64(scene.grain))
    picture += scene.noise * grain.standard_normal((size, size), np.float32)
    picture *= 255
    picture += 0.5
    image = np.clip(picture, 0, 255, out=picture).astype(np.uint8)
    return Drawing(np.ascontiguousarray(image.transpose(1, 2, 0)), bird, parts)


def _blend(paint: Paint, cover: Plane, colour: Paint) -> None:
    """Paint ``colour``, (3) or (3, ...), over ``paint`` in place; where the cover is 0, nothing changes."""
    if colour.ndim == 1:
        colour = colour.reshape(3, *[1] * cover.ndim)
    paint += cover * (colour - paint)


def _background(scene: Scene, x: Plane, y: Plane, pixel: float) -> Paint:
    """Two colours in soft patches, and clutter over them."""
    size = x.shape[1]
    # bilinear interpolation of a coarse grid of random numbers, as two small matrix products
    knots = np.linspace(0, 1, len(scene.patches), dtype=np.float32)
    hats = np.maximum(1 - np.abs(x.T - knots) * (len(knots) - 1), 0)  # (size, knots)
    patches = hats @ scene.patches @ hats.T
    first, second = scene.ground[:, :, None, None]
    picture: Paint = first + patches * (second - first)
    for row in scene.clutter:
        cx, cy, angle, long, wide, opacity = row[:6].tolist()
        # only the square around the shape is changed
        left, right = max(int((cx - long) * size) - 1, 0), int((cx + long) * size) + 2
        top, bottom = max(int((cy - long) * size) - 1, 0), int((cy + long) * size) + 2
        shape = ellipse(x[:, left:right], y[top:bottom], (cx, cy), (long, wide), angle)
        _blend(picture[:, top:bottom, left:right], opacity * coverage(shape, pixel), row[6:])
    return picture


def _perch(picture: Paint, scene: Scene, u: Plane, v: Plane, pixel: float) -> None:
    """The branch under the bird's feet."""
    slope, width, shade = scene.branch[3:].tolist()
    tilt = 0.3 * (slope - 0.5)
    branch = capsule(u, v, (-1.2, 0.33 - tilt), (1.2, 0.33 + tilt), 0.022 + 0.02 * width)
    _blend(picture, coverage(branch, pixel), scene.branch[:3] * (0.7 + 0.5 * shade))


def _outline(scene: Scene, u: Plane, v: Plane) -> tuple[Plane, Plane, Plane]:
    """Distances to the body with head and tail, to the bill, and to the legs."""
    trunk = ellipse(u, v, (0.02, 0.02), (0.285, 0.172 * scene.plump), _TURN)
    body = smooth_union(trunk, _head(scene, u, v), 0.10)
    body = smooth_union(body, _tail(scene, u, v), 0.06)
    legs = union([capsule(u, v, hip, foot, 0.010) for hip, foot in _LEGS])
    return body, polygon(u, v, _BILL), legs


def _head(scene: Scene, u: Plane, v: Plane) -> Plane:
    return circle(u, v, _HEAD, 0.125 * scene.head)


def _tail(scene: Scene, u: Plane, v: Plane) -> Plane:
    end = -0.30 - 0.24 * scene.tail
    return polygon(u, v, ((-0.16, 0.17), (end + 0.025, 0.275), (end, 0.215), (-0.14, 0.07)))


def _wing(u: Plane, v: Plane) -> Plane:
    front = ellipse(u, v, (-0.065, 0.010), (0.215, 0.092), _TURN)
    tip = polygon(u, v, ((-0.05, 0.085), (-0.375, 0.180), (-0.385, 0.160), (-0.13, 0.02)))
    return smooth_union(front, tip, 0.04)


def _plumage(scene: Scene, marks: Marks, u: Plane, v: Plane, pixel: float) -> tuple[Paint, Mask]:
    """Colours (3, n) of the bird's n pixels, and the mask of the parts in which species differ."""
    body, bill, legs = _outline(scene, u, v)
    head, wing, tail = _head(scene, u, v), _wing(u, v), _tail(scene, u, v)
    back, pale, dark = scene.back[:, None], scene.pale[:, None], scene.dark[:, None]

    # dark above and pale below; wing and tail darker, with the lines of feathers
    along = v - math.tan(_TURN) * u
    paint = back + np.clip(0.9 * along * 5 + 0.15, 0, 0.75) * (pale - back)
    feathers = 0.66 + 0.07 * np.sin(75 * along)
    _blend(paint, coverage(tail, pixel), 0.9 * feathers * back)
    _blend(paint, coverage(wing, pixel), feathers * back)
    _blend(paint, 0.5 * np.clip(1 - np.abs(wing) / 0.011, 0, 1), 0.35 * back)
    _blend(paint, coverage(circle(u, v, _EYE, 0.025), pixel), dark)
    _blend(paint, coverage(circle(u, v, (_EYE[0] + 0.008, _EYE[1] - 0.009), 0.007), pixel), pale)
    _blend(paint, coverage(legs, pixel) * (body > 0), 0.5 * (dark + scene.bright[:, None]))

    parts = _paint_marks(paint, scene, marks, u, v, pixel, head, bill)

    # the side away from the sun and the rim are darker
    towards = scene.sun[0] * (-1 if scene.flip else 1) * u + scene.sun[1] * v
    return paint * (0.88 + 0.36 * towards + 1.6 * np.clip(-body, 0, 0.09)), parts


def _paint_marks(
    paint: Paint, scene: Scene, marks: Marks, u: Plane, v: Plane, pixel: float, head: Plane, bill: Plane
) -> Mask:
    """Paint the marks of a species; returns the pixels of all possible marks."""
    reach = circle(u, v, _HEAD, 0.0)
    pale, dark = (scene.pale, scene.contrast), (scene.dark, scene.faint)
    shapes = (
        *((capsule(u, v, start, end, 0.019), marks.bars > i, *pale) for i, (start, end) in enumerate(_BARS)),
        (np.abs(circle(u, v, _EYE, 0.043)) - 0.015, marks.ring, *pale),
        (intersection([np.abs(head + 0.026) - 0.019, v - 0.30 * u + 0.350]), marks.crown, *pale),
        (union([circle(u, v, spot, 0.022) for spot in _SPOTS]), marks.breast == 1, *dark),
        (intersection([np.abs(reach - 0.190) - 0.021, 0.14 - u, -0.12 - v]), marks.breast == 2, *dark),
    )
    beak = coverage(bill, pixel) * (head > 0)
    _blend(paint, beak, 1.6 * scene.dark)
    if marks.bright_bill:
        _blend(paint, scene.faint * beak, scene.bright)
    parts = beak > 0
    for shape, present, colour, strength in shapes:
        cover = coverage(shape, pixel)
        parts |= cover > 0
        if present:
            _blend(paint, strength * cover, colour)
    return parts


def circle(u: Plane, v: Plane, centre: Point, radius: float) -> Plane:
    """Exact distance to a circle."""
    return _length(u - centre[0], v - centre[1]) - radius


def ellipse(u: Plane, v: Plane, centre: Point, radii: Point, angle: float) -> Plane:
    r"""Distance to an ellipse whose first axis is turned by ``angle`` from u to v; exact to the first order at its edge.

    It is :math:`k_0 (k_0 - 1) / k_1, k_0 = \lVert (x/r_x, y/r_y) \rVert, k_1 = \lVert (x/r_x^2, y/r_y^2) \rVert`.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    du, dv = u - centre[0], v - centre[1]
    x = du * (cos / radii[0]) + dv * (sin / radii[0])
    y = dv * (cos / radii[1]) - du * (sin / radii[1])
    k0 = _length(x, y)
    # at the centre both lengths are 0
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
    """Distance to a convex polygon, exact inside and along its edges; the corners are in the direction from u to v."""
    edges = []
    for (u0, v0), (u1, v1) in zip(corners, [*corners[1:], corners[0]], strict=True):
        length = math.hypot(u1 - u0, v1 - v0)
        nu, nv = (v1 - v0) / length, (u0 - u1) / length
        edges.append(u * nu + v * nv - (nu * u0 + nv * v0))
    return intersection(edges)


def union(shapes: Sequence[Plane]) -> Plane:
    """Distance to the union of shapes."""
    return reduce(np.minimum, shapes)


def intersection(shapes: Sequence[Plane]) -> Plane:
    """Distance to the intersection of shapes."""
    return reduce(np.maximum, shapes)


def smooth_union(a: Plane, b: Plane, blend: float) -> Plane:
    """Distance to the union of two shapes, with the crease between them filled over the length ``blend``."""
    overlap = np.maximum(blend - np.abs(a - b), 0)
    return np.minimum(a, b) - overlap * overlap * (0.25 / blend)


def coverage(distance: Plane, pixel: float) -> Plane:
    """Fraction of each pixel that a shape covers, for pixels of width ``pixel``; exactly 0 or 1 away from the edge."""
    return np.clip(0.5 - distance * (1 / pixel), 0, 1)


def _length(x: Plane, y: Plane) -> Plane:
    return np.sqrt(x * x + y * y)
