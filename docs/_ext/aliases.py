"""Resolve references to public names that are documented under another module, such as ``splitfg.SplitFG``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Node | None:
    """Return a reference to the same object under the name by which the API pages know it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("splitfg"):
        return None
    domain = env.domains["py"]
    for name in _other_names(target):
        if name in domain.objects:
            entry = domain.objects[name]
            docname = node.get("refdoc", env.docname)
            uri = app.builder.get_relative_uri(docname, entry.docname) + f"#{entry.node_id}"
            return nodes.reference("", "", contnode, internal=True, refuri=uri)
    return None


def _other_names(target: str) -> list[str]:
    """The defining module's name of an object, and every package on the way there that may document it."""
    found = _lookup(target)
    home = getattr(found, "__module__", None)
    if home is None or not hasattr(found, "__qualname__"):
        return []
    packages = home.split(".")
    return [f"{'.'.join(packages[:i])}.{found.__qualname__}" for i in range(len(packages), 0, -1)]


def _lookup(target: str) -> Any:
    parts = target.split(".")
    for i in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for name in parts[i:]:
            found = getattr(found, name, None)
        return found
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
