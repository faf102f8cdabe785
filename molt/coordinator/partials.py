# SPDX-License-Identifier: Apache-2.0
"""Which partials files still matter: what runners that are gone left of groups not yet finished."""

from collections.abc import Iterable, Mapping


class Partials:
    """An index of files by group. A file goes when the last of its groups is finished."""

    def __init__(self) -> None:
        self._files: dict[int, list[str]] = {}  # group → files, oldest first
        self._groups: dict[str, set[int]] = {}  # file → groups that are not finished

    def add(self, files: Mapping[str, Iterable[int]]) -> None:
        """Learn about files (in the order they were written) and the groups in them."""
        for path, groups in files.items():
            for group in set(groups) - self._groups.setdefault(path, set()):
                self._groups[path].add(group)
                self._files.setdefault(group, []).append(path)

    @property
    def groups(self) -> set[int]:
        """Groups that have files."""
        return set(self._files)

    def __contains__(self, group: int) -> bool:
        """Whether sessions of a group can be resumed."""
        return group in self._files

    def of(self, group: int) -> tuple[str, ...]:
        """The files that a group's sessions are resumed from."""
        return tuple(self._files.get(group, ()))

    def finished(self, group: int) -> list[str]:
        """A group is on disk whole. Returns the files that nobody needs any more."""
        useless = []
        for path in self._files.pop(group, ()):
            self._groups[path].discard(group)
            if not self._groups[path]:
                del self._groups[path]
                useless.append(path)
        return useless
