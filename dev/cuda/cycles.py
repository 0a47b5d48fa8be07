#!/usr/bin/env python3
"""Floors of kernels in cycles, from their machine code for sm_90: no GPU, no disassembler.

    cycles.py [CUBIN] [KERNEL...]       loops: instructions, by pipe too, and what ptxas wrote for the scheduler
    cycles.py --table [CUBIN]           a pass: floors, predictions, measurements; --write puts it into dev/gpu_speed.md
    cycles.py --check FILE [--write]    loops of the heaviest kernels, compared with a file; --write writes it

Without CUBIN op set "cuda" is compiled in bf16, or taken from build/cycles if nothing changed; CUDA names the toolkit.
An object file needs cuobjdump. KERNEL: a name with patterns, 'delta_walk_kernel<*>'. For one launch:

    --grid N --threads N --shared BYTES     blocks, their threads, their dynamic shared memory
    --blocks N                              blocks of a multiprocessor; otherwise as many as fit
    --trips 32,4:8                          trips: of the main loop (the largest), of loop 4; otherwise 1
    --take A,B  --take-first C              forward branches (hex addresses) that are taken; in the first trip alone
    --some A:1                              a branch that only one warp of a scheduler does not take
    --off STG                               operations under a predicate that do nothing: of an output that is NULL
    --memory CYCLES                         latency of global memory: 600, 300 where the L2 cache has all
    --branches  --waits                     lists forward branches on the path; where warps wait longest

A simulation issues the instructions of one scheduler's warps, one a cycle, warps in turn: stall counts, scoreboards,
pipes, barriers. Forward branches fall through; those around calls, or rows that are copied element by element, are
taken. It knows no bank conflicts, no misses of the instruction cache, no other traffic: a floor, not a prediction.
"""
import argparse, collections, copy, fnmatch, hashlib, os, pathlib, shutil, subprocess, sys, tempfile
from machine_code import NONE, PIPES, Path, read_kernels

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CLOCK, PROCESSORS, SCHEDULERS = 1.755e9, 132, 4  # of an H100
READ, BARRIER, QUEUE = 12, 20, 64  # cycles: until operands are read, a barrier, work that waits at a queued pipe
WHOLE_WAVES = 4  # fewer waves are whole ones: blocks end together
SAMPLED = 4  # trips of the main loop that are simulated; the others take as long as the last


def die(message):
    sys.exit("cycles: " + message)


# ---- simulation ------------------------------------------------------------------------------------------------------
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
        die(f"{kernel.name}: {threads} threads with {shared} bytes of shared memory do not fit a multiprocessor")
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


def pipe_cycles(code, indices):
    cycles = dict.fromkeys(PIPES, 0)
    for i in indices:
        cycles[code[i].pipe] += code[i].cycles
    return cycles


# ---- what is printed -------------------------------------------------------------------------------------------------
COUNTED = {"LDS": ("LDS", "LDSM"), "STS": ("STS",), "LDG": ("LDG", "LD"), "STG": ("STG", "ST"), "copies": ("LDGSTS",)}


def print_loops(kernel, path):
    print(f"{kernel.name}: {kernel.registers} registers, {kernel.spills} local loads and stores ({kernel.stack} bytes)"
          f", {kernel.shared} bytes of static shared memory, {len(kernel.code)} instructions")
    if not kernel.loops:
        return print("  no loop")
    print(f"  {'loop':10}{'from':>6} {'to':>6} {'code':>6} {'a trip':>7} {'stalls':>7} {'waits':>6} | " +
          "".join(f"{name:>9}" for name in PIPES) + " |" + "".join(f"{name:>7}" for name in COUNTED) +
          " | busiest pipe")
    for loop in kernel.loops:
        trip = [kernel.code[i] for i in path.trip(loop)]
        pipes = pipe_cycles(kernel.code, path.trip(loop))
        busiest = max(pipes, key=pipes.get)
        number = "  " * len(loop.around) + f"{loop.number} x{path.trips.get(loop.number, 1)}"
        print(f"  {number:10}{loop.head * 16:6x} {loop.latch * 16:6x} {len(loop.body):6} {len(trip):7} "
              f"{sum(x.stall for x in trip):7} {sum(bool(x.wait) for x in trip):6} | " +
              "".join(f"{sum(x.pipe == pipe for x in trip):9}" for pipe in PIPES) + " |" +
              "".join(f"{sum(x.name in names for x in trip):7}" for names in COUNTED.values()) +
              (f" | {busiest} {pipes[busiest]}" if trip else " | not on the path"))


def goes_around(kernel, i):
    """What a branch jumps over: '8 LDG, 64 HMMA'"""
    code = kernel.code[i + 1:kernel.code[i].target]
    names = [x.name for x in code if x.pipe in ("hmma", "lsu", "xu") and not x.never]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or f"{len(code)} others"


def print_branches(kernel, path):
    for i, (taken, of) in sorted(path.branches.items()):
        loop = path.innermost(i)
        print(f"  branch {i * 16:x} to {kernel.code[i].target * 16:x} in loop {loop.number if loop else '-'}, "
              f"taken {taken} of {of}, around {goes_around(kernel, i)}")


def print_kernel(kernel, a):
    trips, main = {}, kernel.main()
    for part in filter(None, a.trips.split(",")):
        loop, _, n = part.rpartition(":")
        trips[int(loop) if loop else main.number if main else 1] = int(n)
    take, first = ({int(at, 16) // 16 for at in filter(None, text.split(","))} for text in (a.take, a.take_first))
    path = Path(kernel, trips, take, first)
    print_loops(kernel, path)
    if a.branches:
        print_branches(kernel, path)
    if not a.threads:
        return
    some = {int(at, 16) // 16: int(n) for at, n in (x.split(":") for x in a.some.split(",") if x)}
    t = Timing(kernel, trips, a.grid or PROCESSORS, a.threads, a.shared, a.blocks, a.memory, take, first,
               a.off.split(","), some)
    print(f"  {t.blocks} blocks a multiprocessor ({t.limit}), {t.warps} warps a scheduler: a trip of loop "
          f"{main.number if main else '-'} takes {t.trip} cycles, {t.trip / CLOCK * 1e6:.2f} us; all of a block "
          f"{t.cycles}, {t.cycles / CLOCK * 1e6:.1f} us" + (f"; {t.waves:.2f} waves: {t.us:.1f} us" if a.grid else ""))
    total = sum(t.waits.values())
    for i, cycles in t.waits.most_common(16 if a.waits else 0):
        x = kernel.code[i]
        print(f"  {cycles / total:6.1%} of a warp's waiting is before {x.name} at {i * 16:x}" +
              (f", for scoreboards {x.wait}" if x.wait else "") + (f" behind {kernel.code[i - 1].name}" if i else ""))


# ---- cubins ----------------------------------------------------------------------------------------------------------
def find_tool(name):
    return shutil.which(name) or shutil.which(os.path.join(os.environ.get("CUDA", "/usr/local/cuda"), "bin", name))


def cubin_of(path):
    if not os.path.isfile(path):
        die(f"there is no file {path}")
    data = pathlib.Path(path).read_bytes()
    if data[:4] == b"\x7fELF" and data[18] == 190:
        return data
    if not find_tool("cuobjdump"):
        die(f"{path} is no cubin, and cuobjdump is missing; set CUDA, or compile with nvcc -arch=sm_90 -cubin")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([find_tool("cuobjdump"), "-xelf", "all", os.path.abspath(path)], cwd=folder,
                       stdout=subprocess.DEVNULL)
        found = [file.read_bytes() for file in pathlib.Path(folder).iterdir() if "sm_90" in file.name]
    return max(found, key=len) if found else die(f"{path} has no code for sm_90")


def compiler_version():
    """Release and build of nvcc; None: there is none"""
    nvcc = find_tool("nvcc")
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout if nvcc else ""
    return next(("nvcc " + line.split("V")[-1] for line in out.splitlines() if "release" in line), None)


def compiled(symbols=()):
    """The bytes of op set "cuda" in bf16 for sm_90; symbols: parts of mangled names, of these kernels alone"""
    nvcc, ptxas = find_tool("nvcc"), find_tool("ptxas")
    if not nvcc or not ptxas:
        die("nvcc or ptxas is missing; set CUDA to a toolkit, or give a cubin")
    sources = sorted([*ROOT.glob("llmc/**/*.h"), *ROOT.glob("llmc/ops/cuda/*.cu*")])
    made_of = [repr((compiler_version(), symbols)).encode()] + [f.read_bytes() for f in sources]
    cubin = ROOT / "build/cycles" / f"{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}.cubin"
    if not cubin.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(cubin.parent.glob("*.cubin"), key=os.path.getmtime)[:-8]:
            old.unlink()
        compile_to(cubin, nvcc, ptxas, symbols)
    return cubin.read_bytes()


def compile_to(cubin, nvcc, ptxas, symbols):
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder) / "ops.ptx"
        flags = ["-D_GNU_SOURCE", "-DPRECISION_BF16", "-w", "-I."] + ([] if symbols else ["-DHAVE_CUDNN"])
        subprocess.run([nvcc, "-std=c++20", "-x", "cu", "-O3", "-arch=sm_90", "-ptx", *flags, "-o", ptx,
                        "llmc/ops/cuda/ops_cuda.cu"], cwd=ROOT, check=True)
        entries = [line.split("(")[0].split()[-1] for line in ptx.read_text().splitlines() if ".entry" in line]
        chosen = [argument for e in entries if any(s in e for s in symbols) for argument in ("-e", e)]
        subprocess.run([ptxas, "-arch=sm_90", "-O3", *chosen, ptx, "-o", folder + "/cubin"], check=True)
        shutil.move(folder + "/cubin", cubin)


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("arguments", nargs="*")
    p.add_argument("--table", action="store_true")
    p.add_argument("--check")
    p.add_argument("--write", action="store_true")
    p.add_argument("--branches", action="store_true")
    p.add_argument("--waits", action="store_true")
    for name in ("grid", "threads", "shared", "blocks"):
        p.add_argument("--" + name, type=int, default=0)
    p.add_argument("--memory", type=int, default=600)
    for name in ("trips", "take", "take-first", "some", "off"):
        p.add_argument("--" + name, default="")
    a = p.parse_args()
    if a.check:
        from launches import check_loops
        sys.exit(check_loops(a.check, a.write))
    files = [x for x in a.arguments if x.endswith((".cubin", ".o")) or os.path.isfile(x)]
    patterns = [x for x in a.arguments if x not in files] or ["*"]
    data = cubin_of(files[0]) if files else compiled()
    if a.table:
        from launches import print_table
        return print_table(data, a.write)
    kernels = read_kernels(data, lambda name: any(name == x or fnmatch.fnmatch(name, x) for x in patterns))
    if not kernels:
        die(f"no kernel is called {' or '.join(patterns)}")
    for kernel in kernels:
        print_kernel(kernel, a)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, subprocess.CalledProcessError) as error:
        die(str(error))
