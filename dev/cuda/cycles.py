#!/usr/bin/env python3
"""Floors of kernels in cycles, from their machine code for sm_90a: no GPU, no disassembler.

    cycles.py [CUBIN] [KERNEL...]       loops: instructions, by pipe too, and what ptxas wrote for the scheduler
    cycles.py --table [CUBIN]           a pass: floors, predictions, measurements; --write puts it into dev/gpu_floors.md
    cycles.py --check FILE [--write]    loops of the heaviest kernels, compared with a file; --write writes it

Without CUBIN op set "cuda" is compiled in bf16, or taken from build/cycles if nothing changed; CUDA names the toolkit.
An object file needs cuobjdump. KERNEL: a name with patterns, 'delta_walk_kernel<*>'. For one launch:

    --grid N --threads N --shared BYTES     blocks, their threads, their dynamic shared memory
    --blocks N                              blocks of a multiprocessor; otherwise as many as fit
    --trips 32,4:8                          trips: of the main loop (the largest), of loop 4; otherwise 1
    --take A,B  --take-first C              forward branches (hex addresses) that are taken; in the first trip alone
    --some A:1                              a branch that only one warp of a scheduler does not take
    --off STG                               operations under a predicate that do nothing: of an output that is NULL
    --stages N --load BYTES                 of a pipeline that the first warp group loads: its stages, bytes of one
    --own BYTES                             of a stage, if another block of the cluster sends the rest by multicast
    --memory CYCLES                         latency of global memory: 600, 300 where the L2 cache has all
    --branches  --waits                     lists forward branches on the path; where warps wait longest

A simulation issues the instructions of one scheduler's warps, one a cycle, warps in turn: stall counts, scoreboards,
pipes, barriers. Forward branches fall through; those around calls, or rows that are copied element by element, are
taken. It knows no bank conflicts, no misses of the instruction cache, no other traffic: a floor, not a prediction.

Where a kernel shares out registers (setmaxnreg), the first warp group goes where they are given, the others where they
are taken, and then where their products or loads are. The first one fills stages of a pipeline (mbarrier, TMA). Waits
of the others share out its fills in order, and its waits their arrivals, N waits later; arrivals between the others, or
under a false predicate, are not told apart. A stage is complete --memory cycles after its load, and BYTES / 32 cycles
after the stage before: the block's own bytes. Where a load is a multicast, arrivals also come from another
multiprocessor, 180 cycles later. Blocks of a cluster are taken to be equal, so that one is simulated. Products of warp
groups (wgmma) queue without limit. They take N / 2 cycles, more where they, other accesses and stages need over 128
bytes of shared memory a cycle.
"""
import argparse, fnmatch, os, subprocess, sys
from cubins import compiled, cubin_of
from launches import check_loops, print_table
from machine_code import PIPES, Path, read_kernels
from simulation import CLOCK, PROCESSORS, Timing, goes_around


def die(message):
    sys.exit("cycles: " + message)


def pipe_cycles(code, indices):
    cycles = dict.fromkeys(PIPES, 0)
    for i in indices:
        cycles[code[i].pipe] += code[i].cycles
        cycles["lsu"] += code[i].shared
    return cycles


# ---- what is printed -------------------------------------------------------------------------------------------------
COUNTED = {"LDS": ("LDS", "LDSM"), "STS": ("STS",), "LDG": ("LDG", "LD"), "STG": ("STG", "ST"), "copies": ("LDGSTS",)}


def print_loops(kernel, paths):
    """paths: of a warp, or of one warp of each role; a loop is that of the first path that passes it"""
    print(f"{kernel.name}: {kernel.registers} registers, {kernel.spills} local loads and stores ({kernel.stack} bytes)"
          f", {kernel.shared} bytes of static shared memory, {len(kernel.code)} instructions")
    if not kernel.loops:
        return print("  no loop")
    print(f"  {'loop':10}{'from':>6} {'to':>6} {'code':>6} {'a trip':>7} {'stalls':>7} {'waits':>6} | " +
          "".join(f"{name:>9}" for name in PIPES) + " |" + "".join(f"{name:>7}" for name in COUNTED) +
          " | busiest pipe")
    for loop in kernel.loops:
        path = next((path for path in paths if path.trip(loop)), paths[0])
        trip = [kernel.code[i] for i in path.trip(loop)]
        pipes = pipe_cycles(kernel.code, path.trip(loop))
        busiest = max(pipes, key=pipes.get)
        number = "  " * len(loop.around) + f"{loop.number} x{path.trips.get(loop.number, 1)}"
        print(f"  {number:10}{loop.head * 16:6x} {loop.latch * 16:6x} {len(loop.body):6} {len(trip):7} "
              f"{sum(x.stall for x in trip):7} {sum(bool(x.wait) for x in trip):6} | " +
              "".join(f"{sum(x.pipe == pipe for x in trip):9}" for pipe in PIPES) + " |" +
              "".join(f"{sum(x.name in names for x in trip):7}" for names in COUNTED.values()) +
              (f" | {busiest} {pipes[busiest]}" if trip else " | not on the path"))


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
    paths = [Path(kernel, trips, take, first, role) for role in (("take", "give") if kernel.roles() else ("",))]
    print_loops(kernel, paths)
    for path in paths if a.branches else ():
        print_branches(kernel, path)
    if not a.threads:
        return
    some = {int(at, 16) // 16: int(n) for at, n in (x.split(":") for x in a.some.split(",") if x)}
    t = Timing(kernel, trips, a.grid or PROCESSORS, a.threads, a.shared, a.blocks, a.memory, take, first,
               a.off.split(","), some, a.stages, a.load, a.own)
    print(f"  {t.blocks} blocks a multiprocessor ({t.limit}), {t.warps} warps a scheduler: a trip of loop "
          f"{main.number if main else '-'} takes {t.trip} cycles, {t.trip / CLOCK * 1e6:.2f} us; all of a block "
          f"{t.cycles}, {t.cycles / CLOCK * 1e6:.1f} us" + (f"; {t.waves:.2f} waves: {t.us:.1f} us" if a.grid else ""))
    if t.flops:
        print(f"  products: {t.flops} FLOP of a multiprocessor in a trip, {t.flops / 4096} cycles of its tensor cores: "
              f"{t.flops / t.trip * CLOCK * PROCESSORS / 1e12:.0f} TFLOP/s raw")
    total = sum(t.waits.values())
    for i, cycles in t.waits.most_common(16 if a.waits else 0):
        x = kernel.code[i]
        print(f"  {cycles / total:6.1%} of a warp's waiting is before {x.name} at {i * 16:x}" +
              (f", for scoreboards {x.wait}" if x.wait else "") + (f" behind {kernel.code[i - 1].name}" if i else ""))


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("arguments", nargs="*")
    p.add_argument("--table", action="store_true")
    p.add_argument("--check")
    p.add_argument("--write", action="store_true")
    p.add_argument("--branches", action="store_true")
    p.add_argument("--waits", action="store_true")
    for name in ("grid", "threads", "shared", "blocks", "stages", "load", "own"):
        p.add_argument("--" + name, type=int, default=0)
    p.add_argument("--memory", type=int, default=600)
    for name in ("trips", "take", "take-first", "some", "off"):
        p.add_argument("--" + name, default="")
    a = p.parse_args()
    if a.check:
        sys.exit(check_loops(a.check, a.write))
    files = [x for x in a.arguments if x.endswith((".cubin", ".o")) or os.path.isfile(x)]
    patterns = [x for x in a.arguments if x not in files] or ["*"]
    data = cubin_of(files[0]) if files else compiled()
    if a.table:
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
