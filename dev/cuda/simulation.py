"""Simulates a launch on an H100 from a kernel's machine code (machine_code.py); cycles.py says what it knows."""
import collections, copy
from machine_code import NONE, PIPES, Path

CLOCK, PROCESSORS, SCHEDULERS = 1.755e9, 132, 4  # of an H100
READ, BARRIER, QUEUE = 12, 20, 64  # cycles: until operands are read, a barrier, work that waits at a queued pipe
WHOLE_WAVES = 4  # fewer waves are whole ones: blocks end together
SAMPLED = 4  # trips of the main loop that are simulated; the others take as long as the last


class Warp:
    def __init__(self, block, path):
        self.block, self.path, self.at, self.ready, self.copied = block, path, 0, 0, 0
        self.issued, self.waits = 0, collections.Counter()  # when the last was; cycles before each instruction
        self.boards = [[] for _ in range(6)]  # when what they wait for is done

    def earliest(self, x, free):
        """The first cycle in which x can issue"""
        t = self.ready
        for board in x.wait:
            t = max(t, max(self.boards[board], default=0))
        if x.name == "DEPBAR" and x.left < len(self.boards[x.board]):
            t = max(t, sorted(self.boards[x.board])[-1 - x.left])
        queued = x.pipe in ("lsu", "xu", "constant")
        return max(t, free[x.pipe] - (QUEUE if queued else 0))

    def issue(self, x, now, free, memory):
        self.waits[x.index] += now - self.issued - 1
        self.issued = now
        start = max(now, free[x.pipe])
        free[x.pipe] = start + x.cycles
        done = start + x.cycles + (memory if x.latency is None else x.latency)
        if x.name == "LDGSTS":
            self.copied = max(self.copied, done)
        if x.name == "LDGDEPBAR":
            done = max(done, self.copied)
        self.boards = [[t for t in board if t > now] for board in self.boards]
        if x.write != NONE:
            self.boards[x.write].append(done)
        if x.read != NONE:
            self.boards[x.read].append(start + x.cycles + READ)
        self.at, self.ready = self.at + 1, now + x.stall


def simulate(paths, blocks, memory):
    """Cycles until all warps of a scheduler, of so many blocks, are through their paths; waits of the last warp"""
    free, now, turn = dict.fromkeys(PIPES, 0), 0, 0
    alive = [Warp(w * blocks // len(paths), path) for w, path in enumerate(paths)]
    waiting = {w.block: [] for w in alive}
    size = {b: sum(w.block == b for w in alive) for b in waiting}
    while alive:
        best = None
        for step in range(len(alive)):
            warp = alive[(turn + step) % len(alive)]
            if warp.ready is not None:
                t = max(now, warp.earliest(warp.path[warp.at], free))
                if best is None or t < best[0]:
                    best = t, warp
                if t == now:
                    break
        now, warp = best
        x = warp.path[warp.at]
        warp.issue(x, now, free, memory)
        now, turn = now + 1, (alive.index(warp) + 1) % len(alive)
        if x.name == "BAR":
            at_barrier = waiting[warp.block]
            at_barrier.append(warp)
            warp.ready = None
            if len(at_barrier) == size[warp.block]:
                for other in at_barrier:
                    other.ready = now + BARRIER
                at_barrier.clear()
        if warp.at == len(warp.path):
            alive.remove(warp)
            turn %= max(1, len(alive))
    return now, warp.waits


# ---- a launch --------------------------------------------------------------------------------------------------------
def occupancy(kernel, threads, shared):
    """Blocks that fit a multiprocessor, and what limits them"""
    warps = -(-threads // 32)
    bytes_of_block = -(-(shared + kernel.shared) // 128) * 128 + 1024
    most = {"registers": 65536 // (-(-kernel.registers * 32 // 256) * 256 * warps) if kernel.registers else 32,
            "shared memory": 228 * 1024 // bytes_of_block, "threads": 64 // warps, "blocks": 32}
    limit = min(most, key=most.get)
    if not most[limit]:
        raise ValueError(f"{kernel.name}: {threads} threads with {shared} bytes of shared memory do not fit a multiprocessor")
    return most[limit], limit


def idle(x):
    """x under a predicate that is false"""
    x = copy.copy(x)
    x.cycles, x.latency = 0, 0
    return x


class Timing:
    """A launch: blocks (of a multiprocessor), limit, warps (of a scheduler), trip, cycles (of all trips), waves, us,
    waits. some: {branch: warps of a scheduler that do not take it}"""

    def __init__(self, kernel, trips, grid, threads, shared=0, blocks=0, memory=600, take=(), take_first=(), off=(),
                 some=None):
        self.blocks, self.limit = occupancy(kernel, threads, shared)
        self.blocks = blocks or min(self.blocks, -(-grid // PROCESSORS))
        self.warps = max(1, self.blocks * -(-threads // 32) // SCHEDULERS)
        main = kernel.main()
        n = trips.get(main.number, 1) if main else 1
        simulated = {}
        for t in sorted({min(n, SAMPLED), max(0, min(n, SAMPLED) - 1)}):
            sampled = {**trips, main.number: t} if main else trips
            paths = []
            for warp in range(self.warps // max(1, self.blocks) or 1):
                taken = set(take) | {i for i, falls in (some or {}).items() if warp >= falls}
                path = [kernel.code[i] for i in Path(kernel, sampled, taken, take_first).indices]
                paths.append([idle(x) if x.name in off and x.conditional else x for x in path])
            paths = (paths * self.blocks)[:self.warps]
            simulated[t], self.waits = simulate(paths, min(self.blocks, self.warps), memory)
        top = max(simulated)
        self.trip = simulated[top] - simulated[min(simulated)] if n > 1 else simulated[top]
        self.cycles = simulated[top] + max(0, n - top) * self.trip
        waves = grid / PROCESSORS / self.blocks
        self.waves = max(1, -(-grid // (PROCESSORS * self.blocks)) if waves < WHOLE_WAVES else waves)
        self.us = self.waves * self.cycles / CLOCK * 1e6


def goes_around(kernel, i):
    """What a branch jumps over: '8 LDG, 64 HMMA'"""
    code = kernel.code[i + 1:kernel.code[i].target]
    names = [x.name for x in code if x.pipe in ("hmma", "lsu", "xu") and not x.never]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or f"{len(code)} others"
