"""Every state that gossip between a few ranks can come to: `python tests/explorer explore`.

Breadth first over all orders of events, so what is found wrong comes with a shortest trace. The ranks run training's
own driver and protocol (`rank.py`); what can happen to them, and what must hold, is in `world.py`.

Nobody may wait forever: there must be no state in which somebody waits and nothing can happen, and, of the states in
which a rank waits, no cycle that a fair execution can stay in. Fair: whatever can happen all the time there, and is no
fault, does happen there; and so does what time alone brings again and again (`_AGAIN_AND_AGAIN`).
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from explorer.states import Case, Mode
from explorer.world import FAULTS, RARE, UNFAIR, Label, State, World
from pala.config.catalogue import RULES, TOPOLOGIES
from pala.system.command_line import check_choices, read_command
from pala.system.errors import PalaError
from pala.system.text import table

_PROGRAM = "tests/explorer explore"
_LOOK_EVERY = 1024
_AGAIN_AND_AGAIN = ("timer", "patience", "tick")


@dataclass(frozen=True)
class Command:
    """Explore every order of events of a few ranks, for each combination of the settings below."""

    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks."""
    group: int = 1
    """Ranks of a group, which hold one model and of which one gossips; the last group may be smaller."""
    topologies: tuple[str, ...] = ("ring",)
    """Who sends to whom; of two ranks all but the complete graph are alike."""
    mixings: tuple[str, ...] = ("uniform", "paired")
    """Mixing rules. Which weights push_sum comes to has no end, so it needs `updates`; in all else it is uniform."""
    staleness: tuple[int, ...] = (0, 1, 2)
    """Updates that a rank may begin without a mix."""
    faults: tuple[str, ...] = ()
    """What may happen besides updates and messages; `--faults help` tells."""
    together: int = 0
    """Take each choice of so many of the faults for a case of its own; 0: all of them at once."""
    updates: int = 0
    """The budget of all ranks together, in updates; 0: none, and any rank may find the budget met (fault `stop`)."""
    whole_every: int = 1
    """One of so many models is whole, the others are parts."""
    rare: int = 2
    """How many rare faults a run may have; `garbled`, `refused` and `duplicate` are rare."""
    rare_faults: tuple[str, ...] = ()
    """Which are rare as well. Of the others a run has any number."""
    most_states: int = 2_000_000
    """Give a case up when it has more (300 bytes each, twice as much with liveness)."""
    most_s: float = 600.0
    """Give the search of a case up after so many seconds; that for endless waits comes after it."""
    liveness: bool = True
    """Look for endless waits among the states; if not, states that differ only by ranks' numbers are one."""


@dataclass(frozen=True)
class Violation:
    """What does not hold, and how it comes to that."""

    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {k + 1:3}. {step}" for k, step in enumerate(self.trace))
        return f"{self.what}, after {len(self.trace)} events:\n{steps}"


@dataclass
class Explored:
    """What came of a case."""

    states: int = 0
    transitions: int = 0
    finished: bool = False
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)


class Explorer:
    """One search."""

    def __init__(self, case: Case, symmetry: bool = False, liveness: bool = True) -> None:
        """`symmetry`: states that differ by the ranks' numbers are one; not with `liveness`, which follows a rank."""
        assert not (symmetry and liveness)
        self.world = World(case, symmetry)
        self._liveness = liveness
        self.index: dict[State, int] = {}
        self._parents, self._by = array("l"), array("l")  # of each state: from where, and by which label
        self._labels: dict[Label, int] = {}
        self._begins, self._targets, self._edges = array("l"), array("l"), array("l")  # successors of state k, labels
        self._found: dict[str, Violation] = {}

    def run(self, most_states: int = 10**9, most_s: float = 1e9, first_only: bool = False) -> Explored:
        """Search until all states are known, or a limit is reached; `first_only`: or something does not hold."""
        begin_s, transitions, k = time.perf_counter(), 0, 0
        states: list[State] = []
        for state in self.world.initial():
            self._add(state, -1, -1, states)
        while k < len(states):
            if first_only and self._found:
                break
            if len(states) > most_states or (k % _LOOK_EVERY == 0 and time.perf_counter() - begin_s > most_s):
                break
            transitions += self._expand(k, states)
            k += 1
        finished = k == len(states)
        if self._liveness and finished:
            self._begins.append(len(self._targets))
            self._find_endless_waits(states)
        seconds = time.perf_counter() - begin_s
        return Explored(len(states), transitions, finished, seconds, list(self._found.values()))

    def _expand(self, k: int, states: list[State]) -> int:
        """Look at all that can follow the state. Returns how much that is."""
        world, state = self.world, states[k]
        successors = world.successors(state)
        goes_on = False
        self._begins.append(len(self._targets))
        for label, after, faults in successors:
            for fault in faults:
                self._note(fault, k, label)
            if after is None:
                continue
            number = self._label(label)
            goes_on |= label[0] not in UNFAIR
            target = self._add(world.least(after), k, number, states)
            if self._liveness and label[0] not in UNFAIR:
                self._targets.append(target)
                self._edges.append(number)
        waiting = [r for r in range(world.n) if world.mode(state, r) is Mode.WAITS]
        if waiting and not goes_on:
            self._note(f"deadlock: ranks {waiting} wait forever", k)
        return len(successors)

    def _add(self, state: State, parent: int, label: int, states: list[State]) -> int:
        known = self.index.setdefault(state, len(states))
        if known == len(states):
            states.append(state)
            self._parents.append(parent)
            self._by.append(label)
            for fault in self.world.faults_of(state):
                self._note(fault, known)
        return known

    def _label(self, label: Label) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _note(self, fault: str, state: int, last: Label | None = None) -> None:
        """Keep the first of its kind, which is the shortest."""
        kind = "".join(c for c in fault if not c.isdigit())
        if kind not in self._found:
            self._found[kind] = Violation(fault, tuple(self._trace(state)) + ((told(last),) if last else ()))

    def _trace(self, state: int) -> list[str]:
        labels, steps = list(self._labels), []
        while self._parents[state] >= 0:
            steps.append(told(labels[self._by[state]]))
            state = self._parents[state]
        return steps[::-1]

    # ---- liveness ------------------------------------------------------------------------------------------------

    def _find_endless_waits(self, states: list[State]) -> None:
        world = self.world
        strong = {n for label, n in self._labels.items() if label[0] in _AGAIN_AND_AGAIN or "choice" in str(label[-1])}
        for r in range(world.n):
            waits = bytearray(world.mode(state, r) is Mode.WAITS for state in states)
            work = list(self._components([k for k, w in enumerate(waits) if w], waits))
            while work:
                component = work.pop()
                members = set(component)
                enabled = [{self._edges[e] for e in self._out(k)} for k in component]
                taken = {self._edges[e] for k in component for e in self._out(k) if self._targets[e] in members}
                if not set.intersection(*enabled) <= taken:
                    continue
                missing = (set.union(*enabled) & strong) - taken
                if missing:  # a fair execution stays where these cannot happen, if there is such a part
                    rest = [k for k, labels in zip(component, enabled, strict=True) if not labels & missing]
                    inside = bytearray(len(states))
                    for k in rest:
                        inside[k] = 1
                    work += self._components(rest, inside)
                    continue
                labels = list(self._labels)
                does = ", ".join(sorted({told(labels[n]) for n in taken}))
                first = min(component)
                self._note(f"endless wait: rank {r} can wait forever among {len(component)} states, by: {does}", first)

    def _out(self, k: int) -> range:
        return range(self._begins[k], self._begins[k + 1])

    def _components(self, nodes: list[int], inside: bytearray) -> Iterator[list[int]]:
        """Strongly connected components that have an edge within (Tarjan 1972, without recursion)."""
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        for root in nodes:
            if root in order:
                continue
            path = [(root, iter(self._out(root)))]
            order[root] = low[root] = len(order)
            stack.append(root)
            on_stack.add(root)
            while path:
                k, edges = path[-1]
                for e in edges:
                    target = self._targets[e]
                    if not inside[target]:
                        continue
                    if target not in order:
                        order[target] = low[target] = len(order)
                        stack.append(target)
                        on_stack.add(target)
                        path.append((target, iter(self._out(target))))
                        break
                    if target in on_stack:
                        low[k] = min(low[k], order[target])
                else:
                    path.pop()
                    if path:
                        parent = path[-1][0]
                        low[parent] = min(low[parent], low[k])
                    if low[k] == order[k]:
                        component: list[int] = []
                        while not component or component[-1] != k:
                            component.append(stack.pop())
                            on_stack.discard(component[-1])
                        if len(component) > 1 or any(self._targets[e] == k for e in self._out(k)):
                            yield component


def told(label: Label) -> str:
    """Return an event in words."""
    word, *rest = label
    ranks, more = [x for x in rest if isinstance(x, int)], [x for x in rest if isinstance(x, str)]
    if len(ranks) == 2 and word not in ("notice", "false-death"):
        text = f"{word} {more.pop(0)} {ranks[0]} -> {ranks[1]}"
    elif len(ranks) == 2:
        text = f"{word} of {ranks[1]} at {ranks[0]}"
    else:
        text = " ".join([word, *map(str, ranks)])
    return " ".join([text, *(f"({x})" for x in more)])


# ---- the program -----------------------------------------------------------------------------------------------------


def run(arguments: list[str]) -> None:
    """Run the program. Raises PalaError after a mistake, or if something does not hold."""
    command = read_command(_PROGRAM, arguments, Command())
    if command.faults == ("help",):
        print(table(("fault", "what may happen"), list(FAULTS.items())))
        return
    rows, violations = [], 0
    for case in cases(command):
        explorer = Explorer(case, not command.liveness, command.liveness)
        explored = explorer.run(command.most_states, command.most_s)
        rows.append(row(case, explored))
        print(*rows[-1], sep=", ", flush=True)
        for violation in explored.violations:
            print(violation, flush=True)
        violations += len(explored.violations)
    print(table(HEADER, rows))
    if violations:
        raise PalaError(f"{violations} things do not hold; their traces are above.")


def cases(command: Command) -> list[Case]:
    """Return the cases that a command asks for. Raises PalaError."""
    check_choices("topologies", command.topologies, TOPOLOGIES)
    check_choices("mixings", command.mixings, RULES)
    check_choices("faults", command.faults, FAULTS)
    if min(command.ranks) < 2 or min(*command.staleness, command.updates, command.together, command.rare) < 0:
        raise PalaError("'--ranks' must be at least 2, '--staleness', '--updates', '--together' and '--rare' 0.")
    if not 1 <= command.group < min(command.ranks):
        raise PalaError(f"'--group' is {command.group}, which is below 1 or makes one group of all ranks.")
    if not command.most_s > 0:
        raise PalaError(f"'--most-s' is {command.most_s:g} but must lie above 0.")
    if min(command.whole_every, command.most_states) < 1:
        raise PalaError("'--whole-every' and '--most-states' must be at least 1.")
    most = 4 if 0 in command.staleness else 10
    if max(command.ranks) > most and "random" in command.topologies:
        raise PalaError(
            f"'--topologies' has 'random': that has too many choices with more than {most} ranks, where '--staleness' "
            f"{'has' if most == 4 else 'lacks'} 0."
        )
    if "push_sum" in command.mixings and not command.updates:
        raise PalaError("'--mixings' has 'push_sum', whose weights have no end without '--updates'.")
    for fault in command.rare_faults:
        if fault not in command.faults:
            raise PalaError(f"'--rare-faults': '{fault}' is none of '--faults' ({', '.join(command.faults)}).")
        if fault not in UNFAIR:
            raise PalaError(f"'--rare-faults': '{fault}' cannot be rare: ranks need it to continue.")
    together = command.together or len(command.faults)
    if together > len(command.faults):
        raise PalaError(f"'--together' is {together}, but '--faults' names {len(command.faults)}.")
    rare = frozenset(command.rare_faults)
    found = [
        Case(ranks, topology, mixing, staleness, frozenset(faults), command.updates, command.whole_every,
             rare=rare & {*faults}, most_rare=command.rare, groups=groups_of_size(command.group, ranks))
        for ranks, topology, mixing, staleness, faults in itertools.product(
            command.ranks, command.topologies, command.mixings, command.staleness,
            itertools.combinations(command.faults, together),
        )
        if not (RULES[mixing].by_pairs and TOPOLOGIES[topology].to_all)
    ]  # fmt: skip
    if not found:
        raise PalaError("There is no case to explore: the paired exchange has no complete topology.")
    return found


def groups_of_size(size: int, ranks: int) -> tuple[int, ...]:
    """Return each rank's group; none, if each is one."""
    return tuple(rank // size for rank in range(ranks)) if size > 1 else ()


HEADER = (
    "ranks",
    "groups",
    "topology",
    "mixing",
    "staleness",
    "faults",
    "states",
    "transitions",
    "finished",
    "seconds",
    "violations",
)


def row(case: Case, explored: Explored) -> tuple[str, ...]:
    """Return a case's row of the table."""
    return (
        str(case.ranks),
        _groups(case),
        case.topology,
        case.mixing,
        str(case.max_staleness),
        _faults(case),
        f"{explored.states:,}",
        f"{explored.transitions:,}",
        "yes" if explored.finished else "no",
        f"{explored.seconds:.0f}",
        str(len(explored.violations)),
    )


def _groups(case: Case) -> str:
    return " + ".join(str(case.groups.count(group)) for group in dict.fromkeys(case.groups))


def _faults(case: Case) -> str:
    named = " + ".join(fault for fault in FAULTS if fault in case.faults) or "none"
    rare = (case.rare | RARE) & case.faults
    return f"{named}, at most {case.most_rare} of {' + '.join(sorted(rare))}" if rare else named
