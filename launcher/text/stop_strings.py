"""Finds stop strings in text that arrives in pieces; what is handed out is never taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


class StopStrings:
    """The stop strings of a request, prepared once; `search` follows one answer."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts` are not empty; their order means nothing."""
        self._root = _Node()
        for text in texts:
            assert text, "an empty stop string would end every answer before it starts"
            self._add(text)
        self._link()

    def search(self) -> StopSearch:
        """Return a search that has seen nothing yet."""
        return StopSearch(self._root)

    def _add(self, text: str) -> None:
        node = self._root
        for depth, character in enumerate(text, start=1):
            node = node.children.setdefault(character, _Node(depth=depth))
        node.match = len(text)

    def _link(self) -> None:
        """Let every node know the longest proper suffix of its text that is a prefix here too."""
        waiting = deque([self._root])
        while waiting:
            node = waiting.popleft()
            for character, child in node.children.items():
                if node is not self._root:
                    child.fallback = _step(node.fallback or self._root, character)
                    child.match = child.match or child.fallback.match
                else:
                    child.fallback = self._root
                waiting.append(child)


class StopSearch:
    """The search through one growing text, in time linear in its length.

    The match that is complete first wins; of those complete with the same character, the longest,
    which starts earliest. So the result does not depend on the order of the stop strings or on
    how the text is cut into pieces. Held back is exactly the longest suffix of the text so far
    that is a proper prefix of some stop string.
    """

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._node = root
        self._held = ""
        self.found = False
        """A stop string is complete; nothing may be pushed any more."""

    def push(self, text: str) -> str:
        """Take the next text; return what is certain to lie before any match and was not yet."""
        assert not self.found, "the answer has ended"
        known = self._held + text
        node = self._node
        for end, character in enumerate(text, start=len(self._held) + 1):
            node = _step(node, character)
            if node.match:
                self.found = True
                self._held = ""
                return known[: end - node.match]
        self._node = node
        border = len(known) - node.depth
        self._held = known[border:]
        return known[:border]

    def flush(self) -> str:
        """End the text and return what was held back; empty after a match."""
        rest, self._held = self._held, ""
        self._node = self._root
        return rest


@dataclass(slots=True, eq=False)
class _Node:
    """One prefix of the stop strings, `depth` characters long."""

    depth: int = 0
    match: int = 0
    """Length of the longest stop string that this prefix ends with; 0: none."""
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper suffix that is a prefix as well; None: the empty prefix itself."""


def _step(node: _Node, character: str) -> _Node:
    """Return the longest prefix that the text of `node` and `character` end with."""
    while character not in node.children:
        if node.fallback is None:
            return node
        node = node.fallback
    return node.children[character]
