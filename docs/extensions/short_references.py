"""Resolve references by short names, such as ``:func:`sqrt_covariance```, from any module.

A name without a page is set as code; an ambiguous name is a warning.
"""

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Node | None:
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".~")
    objects = env.domains["py"].data["objects"]
    # eigengrain.explain.saliency.EigenSaliency is on a page as eigengrain.explain.EigenSaliency
    last = target.split(".")
    names = [target] if not target.startswith("eigengrain.") else [target, last[-1]]
    matches: dict[str, object] = {}
    for name in names:
        matches = {full: entry for full, entry in objects.items() if full == name or full.endswith("." + name)}
        if matches:
            break
    places = {(entry.docname, entry.node_id): entry for entry in matches.values()}
    if len(places) > 1 and "." not in target:
        top = {k: v for k, v in places.items() if v.objtype in ("class", "function", "exception", "data")}
        places = top or places
    if not places:
        return None
    if len(places) > 1:
        logger.warning("%s may be any of %s", target, ", ".join(sorted(matches)), location=node)
    entry = next(iter(places.values()))
    return make_refnode(app.builder, node.get("refdoc", env.docname), entry.docname, entry.node_id, content, target)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
