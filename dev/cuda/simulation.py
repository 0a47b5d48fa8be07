"""Simulates a launch on an H100 from a kernel's machine code (machine_code.py); cycles.py says what it knows."""
import collections, copy
from machine_code import LOADS, NONE, PIPES, Path

CLOCK, PROCESSORS, SCHEDULERS = 1.755e9, 132, 4  # of an H100
L2, PORT = 32, 128  # bytes a cycle: of the L2 cache for each multiprocessor, of shared memory
REMOTE = 180  # cycles until a barrier of another multiprocessor counts an arrival (arXiv 2402.13499 measures this latency)
SHARED = ("LDS", "LDSM", "STS", "STSM")
READ, BARRIER, QUEUE = 12, 20, 64  # cycles: until operands are read, a barrier, work that waits at a queued pipe
SPREAD = 512  # cycles over which reads and writes of shared memory spread
WHOLE_WAVES = 4  # fewer waves are whole ones: blocks end together
SAMPLED = 4  # trips of the main loop that are simulated; the others take as long as the last quarter
SAMPLED_GROUPS = 16  # the same, of a kernel whose warp groups have roles


class Block:
    """What warps of a block wait for. waiting: {barrier: warps that have come}. fills: when each stage that the loader
    fills is complete. stages: of the pipeline. load, own: bytes of a stage; those that this block loads. The other
    blocks of a cluster do the same at the same time"""

    def __init__(self, stages, load, own):
        self.stages, self.load, self.own, self.warps, self.waiting, self.fills = stages, load, own, [], {}, []

    def loader(self):
        return next((w for w in self.warps if w.loads), None)

    def over(self, warp):
        """When the next wait of a warp is over; None: not known yet. A consumer's waits share out all fills in order, and
        the loader's waits all arrivals of consumers, `stages` waits later"""
        loader = self.loader()
        if not loader:
            return 0
        if warp is not loader or warp.products:
            n = warp.waited * loader.count["expect"] // warp.count["wait"]
            return self.fills[n] if n < len(self.fills) else None
        if not self.stages:
            raise ValueError("a warp group loads stages for others: give their number, --stages")
        times = [0]
        for other in self.warps if warp.waited >= self.stages else ():
            n = -(-(warp.waited - self.stages + 1) * other.count["arrive"] // warp.count["wait"])
            times.append(None if n > len(other.freed) else other.freed[n - 1] if n and other is not loader else 0)
        return None if None in times else max(times) + (REMOTE if loader.multicast else 0)

    def loaded(self, done):
        before = self.fills[-2] if len(self.fills) > 1 else 0
        self.fills[-1] = max(done, (before or 0) + self.own // L2)

    def meet(self, x, warp, now):
        """warp comes to barrier x: the last one lets all go on"""
        at = self.waiting.setdefault((x.key, x.threads), [])
        at.append(warp if x.kind != "arrive" else None)
        if x.kind != "arrive":
            warp.ready = None
        if len(at) == (max(1, x.threads // (32 * SCHEDULERS)) if x.threads else len(self.warps)):
            for waiting in filter(None, at):
                waiting.ready = now + BARRIER
            at.clear()


class Warp:
    def __init__(self, block, path):
        self.block, self.path, self.at, self.ready, self.copied = block, path, 0, 0, 0
        self.issued, self.waits = 0, collections.Counter()  # when the last was; cycles before each instruction
        self.boards = [[] for _ in range(6)]  # when what they wait for is done
        self.groups, self.waited, self.freed = [], 0, []  # of products: when they end; waits so far; freed stages: when
        self.loads = sum(x.name in LOADS for x in path)
        self.multicast = any(x.name in LOADS and x.kind == "multicast" for x in path)
        self.products = any(x.name in ("HMMA", "HGMMA") for x in path)
        self.count = collections.Counter(x.kind for x in path if x.name == "SYNCS")
        block.warps.append(self)

    def start(self, x, now, free):
        """When the pipe begins with x. Products slow down where shared memory has more to do than they take: `port`"""
        start = max(now, free[x.pipe])
        shared = x.shared if x.name == "HGMMA" else x.cycles if x.name in SHARED else 0
        if shared:
            free["port"] = max(free["port"], start) + shared
        free[x.pipe] = max(start + x.cycles, free["port"] - SPREAD if x.name == "HGMMA" else 0)
        return start

    def earliest(self, x, free):
        """The first cycle in which x can issue; None: not known yet"""
        t = self.ready
        for board in x.wait:
            t = max(t, max(self.boards[board], default=0))
        if x.name == "DEPBAR" and x.left < len(self.boards[x.board]):
            t = max(t, sorted(self.boards[x.board])[-1 - x.left])
        if x.name == "HGMMA":
            return t
        if x.name == "WARPGROUP" and x.kind == "wait":
            return max(t, self.groups[-1 - x.left] if x.left < len(self.groups) else 0)
        if x.name == "SYNCS" and x.kind == "wait":
            over = self.block.over(self)
            return None if over is None else max(t, over)
        queued = x.pipe in ("lsu", "xu", "constant")
        return max(t, free[x.pipe] - (QUEUE if queued else 0))

    def issue(self, x, now, free, memory):
        self.waits[x.index] += now - self.issued - 1
        self.issued = now
        start = self.start(x, now, free)
        done = start + x.cycles + (memory if x.latency is None else x.latency)
        if x.name == "LDGSTS":
            self.copied = max(self.copied, done)
        if x.name == "LDGDEPBAR":
            done = max(done, self.copied)
        self.issue_hopper(x, now, done, free, memory)
        self.boards = [[t for t in board if t > now] for board in self.boards]
        if x.write != NONE:
            self.boards[x.write].append(done)
        if x.read != NONE:
            self.boards[x.read].append(start + x.cycles + READ)
        self.at, self.ready = self.at + 1, now + x.stall

    def issue_hopper(self, x, now, done, free, memory):
        loads = self.block.loader() is self
        if x.name == "HGMMA" and x.kind == "last":
            self.groups = self.groups[-7:] + [free["hmma"] + x.latency]
        elif x.name in LOADS and loads and self.block.fills:
            self.block.loaded(done + memory)
        elif x.name == "SYNCS":
            self.waited += x.kind == "wait"
            if x.kind == "arrive":
                self.freed.append(now)
            elif x.kind == "expect" and loads:
                self.block.fills.append(None)
                free["port"] = max(free["port"], now) + self.block.load // PORT


def simulate(paths, blocks, memory, stages=0, load=0, own=0):
    """Cycles until all warps of a scheduler, of so many blocks, are through their paths; waits of the last warp"""
    free, now, turn = dict.fromkeys((*PIPES, "port"), 0), 0, 0
    of_block = [Block(stages, load, own or load) for _ in range(blocks)]
    alive = [Warp(of_block[w * blocks // len(paths)], path) for w, path in enumerate(paths)]
    while alive:
        best = None
        for step in range(len(alive)):
            warp = alive[(turn + step) % len(alive)]
            t = None if warp.ready is None else warp.earliest(warp.path[warp.at], free)
            if t is not None:
                t = max(now, t)
                if best is None or t < best[0]:
                    best = t, warp
                if t == now:
                    break
        if not best:
            raise ValueError("all warps wait for a stage that nobody loads or frees: give --trips of both roles' loops")
        now, warp = best
        x = warp.path[warp.at]
        warp.issue(x, now, free, memory)
        now, turn = now + 1, (alive.index(warp) + 1) % len(alive)
        if x.name == "BAR":
            warp.block.meet(x, warp, now)
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
    waits, flops (of matrix products, in a multiprocessor's trip). some: {branch: warps of a scheduler that do not take
    it}. stages, load, own: of a pipeline whose first warp group loads (Block)"""

    def __init__(self, kernel, trips, grid, threads, shared=0, blocks=0, memory=600, take=(), take_first=(), off=(),
                 some=None, stages=0, load=0, own=0):
        self.blocks, self.limit = occupancy(kernel, threads, shared)
        self.blocks = blocks or min(self.blocks, -(-grid // PROCESSORS))
        self.warps = max(1, self.blocks * -(-threads // 32) // SCHEDULERS)
        main = kernel.main()
        n = trips.get(main.number, 1) if main else 1
        sampled = SAMPLED_GROUPS if kernel.roles() else SAMPLED
        simulated, flops = {}, {}
        for t in sorted({min(n, sampled), max(0, min(n, sampled) - sampled // SAMPLED)}):
            paths = []
            for warp in range(self.warps // max(1, self.blocks) or 1):
                taken = set(take) | {i for i, falls in (some or {}).items() if warp >= falls}
                role = "" if not kernel.roles() else "take" if warp else "give"
                sample = dict.fromkeys(main_loops(kernel, trips, taken, role), t)
                path = Path(kernel, {**trips, **sample}, taken, take_first, role)
                paths.append([idle(x) if x.name in off and x.conditional else x
                              for x in (kernel.code[i] for i in path.indices)])
            paths = (paths * self.blocks)[:self.warps]
            flops[t] = sum(x.flops for path in paths for x in path)
            simulated[t], self.waits = simulate(paths, min(self.blocks, self.warps), memory, stages, load, own)
        top, low = max(simulated), min(simulated)
        self.trip, self.flops = simulated[top], flops[top]
        if n > 1:
            self.trip, self.flops = ((x[top] - x[low]) // (top - low) for x in (simulated, flops))
        self.cycles = simulated[top] + max(0, n - top) * self.trip
        waves = grid / PROCESSORS / self.blocks
        self.waves = max(1, -(-grid // (PROCESSORS * self.blocks)) if waves < WHOLE_WAVES else waves)
        self.us = self.waves * self.cycles / CLOCK * 1e6


def main_loops(kernel, trips, take, role):
    """Numbers of the main loop and, of a warp with a role, of its own largest outermost loop"""
    main = kernel.main()
    if not main:
        return []
    if not role:
        return [main.number]
    passed = set(Path(kernel, trips, take, (), role).indices)
    own = [loop for loop in kernel.loops if loop.head in passed and not loop.around]
    return [main.number] + [max(own, key=lambda loop: len(loop.body)).number] if own else [main.number]


def goes_around(kernel, i):
    """What a branch jumps over: '8 LDG, 64 HMMA'"""
    code = kernel.code[i + 1:kernel.code[i].target]
    names = [x.name for x in code if x.pipe in ("hmma", "lsu", "xu") and not x.never]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or f"{len(code)} others"
