"""Launches of a pass at the shapes of dev/cuda/bench.cu: one layer and a chunk of 4096 tokens, Qwen3-8B's widths, and
Qwen3.5-9B's for linear attention, Nemotron-3 Nano's for Mamba-2, LFM2's for gates, Gemma 4's for heads of 512, gpt-oss'
for sinks; of 8192 tokens at Qwen3-30B-A3B's for experts, 512 rows each. Loops are numbered as cycles.py prints them;
where a kernel has another number of loops than `loops`, its trips are out of date, and the table says "stale". Then:
cycles.py KERNEL --branches.
"""
import fnmatch, itertools, json, pathlib, re
from cubins import ROOT, compiled, compiler_version
from machine_code import Path, read_kernels
from simulation import PROCESSORS, Timing, goes_around

n, C, HEADS, HD, FF, V, LOGITS = 4096, 4096, 32, 128, 12288, 151936, 2048
HK, HV, CHANNELS, SEGMENT = 16, 32, 8192, 32  # of linear attention; blocks of 64 tokens
GROUPS, SSD_HEADS, SSD_CHANNELS, SSD_VALUES = 8, 64, 6144, 4096  # of Mamba-2; states of 128, heads of 64
LAYER = 2 * C * HEADS * HD + 2 * C * 8 * HD + 3 * C * FF
DRAM = 3.35e12  # bytes/s of an H100
NORM_BLOCKS = 528
ROWS, EXPERTS, C_EXPERTS, I_EXPERTS = 8 * 8192, 128, 2048, 768
GPT_OSS, HALF = (4 * 8192, 32), (ROWS // 2, EXPERTS)  # rows and experts of gpt-oss-20b, and of half a chunk
STREAM, WIDE_HEADS = 32768, 16  # tokens of whom the chunk is the last; heads of 512 elements, over 2 of keys
PAIRS = n * (STREAM - n) + n * (n + 1) // 2  # of a query and a key that it sees
MAIN = 0  # in trips: the main loop, whatever its number


class Launch:
    """times: in a call of the op. trips: {loop: trips}. take, first: forward branches that are taken, in all trips or
    the first; patterns of what they go around, as --branches prints it, "pattern#2": the second. some: {pattern: warps
    of a scheduler that do not}. loops: None if only MAIN has trips. stages, load, own: of a pipeline, see cycles.py"""

    def __init__(self, kernel, grid, threads, shared=0, trips=None, loops=1, times=1, take=(), some=None, first=(),
                 stages=0, load=0, own=0):
        self.kernel, self.grid, self.threads, self.shared, self.times = kernel, grid, threads, shared, times
        self.stages, self.load, self.own = stages, load, own
        self.trips, self.loops, self.take, self.some, self.first = trips or {}, loops, take, some or {}, first


def blocks(times, take=()):
    return Launch("delta_blocks_kernel", SEGMENT * HV, 128, 36864, {2: 2, 3: 0, 4: 0, 6: 0}, 6, times, take)


def walk(kind, times=1, take=()):
    return Launch(f"delta_walk_{kind}", 4 * HV, 256, 110624, {MAIN: SEGMENT}, None, times, take)


def ssd_blocks(times, take=()):
    return Launch("ssd_blocks_kernel<false>", SEGMENT * GROUPS, 128, 36864, {2: 2, 3: 0, 4: 0, 5: SSD_HEADS // GROUPS},
                  5, times, take)


def ssd_walk(kind, times=1, take=()):
    return Launch(f"ssd_walk_{kind}", 2 * SSD_HEADS, 256, 70656, {MAIN: SEGMENT}, None, times, take)


def column_sums(rows, columns):
    return Launch("column_sums_kernel<float>", -(-columns // 32), 512, trips={2: -(-rows // 128)}, loops=2)


def elements(kernel, count, width, **more):
    """A loop over packs with the grid's stride"""
    return Launch(kernel, min(2048, count // width // 256), 256, **more)


def packs(count, width):
    """Trips of such a loop"""
    return -(-count // width // (2048 * 256))


def grouped(form, width, out_width):
    """A row of a grouped product of all experts, and its time at 800 TFLOP/s; whole tiles, without an old result"""
    tile, deep = 128, 64
    wide = -(-(width if form else out_width) // tile)
    tiles, depth = (EXPERTS * -(-out_width // tile), ROWS // EXPERTS) if form == 2 else (
        ROWS // tile, out_width if form else width)
    search = {} if form == 2 else {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 2, 7: 1}  # of the expert of a tile
    take = (r"64 LDG, 72 STG",) if form == 2 else (r"64 LDG, 128 STG", r"64 LDG, 64 STG#2")
    elements = EXPERTS * width * out_width
    size = 2 * ROWS * (width + out_width) + (8 if form == 2 else 2) * elements
    shared = 3 * 2 * ((tile * (deep + 8) if form < 2 else deep * (tile + 8)) +
                      (tile * (deep + 8) if form < 1 else deep * (tile + 8)))
    return (("experts_forward", "experts_backward_input", "experts_backward_weight")[form],
            f"[{out_width}, {width}]", size, max(2 * ROWS * width * out_width / 800e6, size / DRAM * 1e6),
            [Launch(f"experts_product_kernel<(ProductForm){form}, ProductTile{{128, 128, 64, 64, 3}}, true>",
                    tiles * wide, 128, shared, {**search, MAIN: depth // deep}, len(search) + 1, take=take)])


def grouped_wgmma(op, kernel, width, out_width, model=(ROWS, EXPERTS)):
    """A row of a grouped product by wgmma: experts' whole tiles of 192 rows, and their last ones of 64 or 128"""
    (rows, experts), tile, deep = model, 192, 64
    columns, depth = (width, out_width) if "input" in op else (out_width, width)
    across, stages, of_expert = -(-columns // tile), depth // deep, rows // experts
    whole, groups = of_expert // tile, -(-(of_expert % tile) // deep)

    def tiles(count, groups):
        some = {} if groups == tile // deep else {"4 HGMMA": 1 + groups, r"\d+ STS, .*STG.*#1": 1 + groups}
        trips = {MAIN: -(-experts * count * across // PROCESSORS), 10: stages, 13: stages, 14: groups}
        return Launch(kernel, PROCESSORS, 512, 200000, trips, 16, some=some, stages=4,
                      load=2 * deep * (groups * deep + tile), own=2 * deep * (groups * deep // 2 + tile))

    size = 2 * rows * (width + out_width) + 2 * experts * width * out_width
    return (op, f"[{out_width}, {width}], wgmma, {of_expert} rows", size, 2 * rows * width * out_width / 650e6,
            [tiles(whole, tile // deep)] + ([tiles(1, groups)] if groups else []))


def wide(kernel, rows, passing, loops, main, take):
    """Heads of 512. rows: of a block, for one head of queries or all of a head of keys; passing: rows of a tile"""
    trips = WIDE_HEADS * PAIRS // passing  # of all blocks, for each row
    blocks = (2 * STREAM if "dkv" in kernel else WIDE_HEADS * n) // rows
    return Launch(kernel, blocks, 256, trips={**dict.fromkeys(range(2, loops + 1), 0), main: trips // (blocks * rows)},
                  loops=loops, take=take)


def hopper(kernel, HD, heads, key_heads, held, passing, stages, load, take=()):
    """A pass of backward by wgmma, in tiles that all queries see. held: rows that a block sums: queries of a head, or
    keys for all heads of queries that read them; passing: rows of a tile"""
    blocks = (key_heads * STREAM if "dkv" in kernel else heads * n) // held
    edges = r"[4-9]\d others|1\d\d others"
    trips = {MAIN: heads * PAIRS // (held * passing * blocks)}
    return Launch(f"attention_{kernel % HD}", blocks, 384, 160 << 10, trips, None, take=(edges, *take), stages=stages,
                  load=load)


def hopper_backward(HD, heads, key_heads, predicted, dkv, dq, take=()):
    return ("attention_backward", f"heads of {HD}, wgmma", 8 * n * heads * HD,
            10 * HD * heads * PAIRS / (predicted * 1e6),
            [hopper("dkv_hopper_kernel<%d>", HD, heads, key_heads, *dkv, take),
             hopper("dq_hopper_kernel<%d, false>", HD, heads, key_heads, *dq)])


WGMMA = "experts_wgmma_kernel<(ProductForm)%d, 192>"
WIDE = "attention_wide_%skernel<512, WideTiles{%s}%s>"
NO_EDGE = ("27 others", "28 others")  # all keys of a tile are seen
FORWARD = ("8 LDSM, 8 STG#2",)  # no transposed inverse
NO_SCORES = ("8 LDGSTS, 16 LDG, 16 STS, 20 LDSM, 32 HMMA", "28 LDS, 32 MUFU, 32 STS", "8 LDSM, 8 STG")
NOT_SAVED = ("12 LDS, 18 STG", "10 LDS, 19 STG", "8 STS")  # states and additions
LAYER_LOOP = packs(LAYER, 4)
# Op and what it is of, as dev/cuda/bench.cu has them; bytes; microseconds predicted in dev/gpu_floors.md, None: 85 % of
# the memory's bandwidth; launches
PASS = {
    "Qwen3-8B": (
        ("embedding_forward", "", 4 * n * C, None,
         [Launch("embedding_forward_kernel<8>", 2 * n, 256, trips={1: 0, 2: 1}, loops=2, take=(r"\d+ others",))]),
        ("rmsnorm_forward", "hidden", 4 * n * C, None,
         [Launch("norm_forward_kernel<8, 4, false>", n, 128, trips={1: 5, 2: 0, 4: 0}, loops=4)]),
        ("rmsnorm_forward", "query heads", 4 * n * C, None,
         [Launch("norm_forward_kernel<8, 1, false>", n * HEADS // 16, 256, trips={1: 4, 2: 0, 3: 0, 4: 0}, loops=4)]),
        ("rmsnorm_backward", "hidden", 6 * n * C, 50,
         [Launch("norm_backward_kernel<8, 4, false>", NORM_BLOCKS, 128,
                 trips={1: 8, 2: 5, 3: 0, 5: 0, 7: 0, 8: 0, 9: 0, 10: 0}, loops=10), column_sums(NORM_BLOCKS, C)]),
        ("rmsnorm_backward", "query heads", 6 * n * C, 35,
         [Launch("norm_backward_kernel<8, 1, false>", NORM_BLOCKS, 256,
                 trips={1: 16, 2: 4, 3: 0, 4: 0, 5: 0, 6: 0, 7: 15}, loops=7), column_sums(NORM_BLOCKS, HD)]),
        ("rope_forward", "queries", 4 * n * C, 23,
         [Launch("rope_kernel<8, false>", 512, 256, trips={**dict.fromkeys(range(2, 10), 0), 10: 4}, loops=10)]),
        ("swiglu_forward", "", 6 * n * FF, None,
         [Launch("activation_forward_kernel<8, 0>", n * FF // 8 // 256, 256)]),
        ("swiglu_backward", "", 10 * n * FF, None,
         [Launch("activation_backward_kernel<8, 0>", n * FF // 8 // 256, 256)]),
        ("logprob", "with its gradient", 6 * LOGITS * V, 650,
         [Launch("logprob_kernel<false, false>", LOGITS, 512,
                 trips={1: 37, 2: 0, 3: 9, 4: 37, 5: 0, 6: 0, 7: 0, 8: 0, 9: 0}, loops=9)]),
        ("round_sums", "a layer", 6 * LAYER, None,
         [elements("round_sums_kernel<8>", LAYER, 8, trips={1: packs(LAYER, 8)})]),
        ("gradient_add", "a layer", 8 * LAYER, None,
         [elements("gradient_add_kernel<Bf16, 4>", LAYER, 4, trips={1: LAYER_LOOP})]),
        ("sum_of_squares", "a layer; the host waits", 2 * LAYER, None,
         [Launch("squares_kernel<Bf16, 8>", 512, 256, trips={1: LAYER // 8 // (512 * 256)})]),
        ("adamw", "a layer, fp32 master", 28 * LAYER, None,
         [elements("adamw_kernel<float, Bf16, float, 4>", LAYER, 4, trips={1: LAYER_LOOP, 2: 0}, loops=2)]),
        ("adamw", "a layer, fp32 master, int8 moments", 16 * LAYER, None,
         [Launch("adamw_8_bits_kernel<float, Bf16, 4>", 2048, 256, trips={1: LAYER // 256 // (2048 * 8)})]),
    ),
    "Qwen3.5-9B": (
        ("conv_forward", "query, key, value", 134e6, 40,
         [Launch("conv_forward_kernel<8, 4, 0>", n // 16 * CHANNELS // 1024, 128, trips={2: 4}, loops=2)]),
        ("conv_backward", "query, key, value", 218e6, 65,
         [Launch("conv_backward_kernel<4, 4, 0, false>", n // 128 * CHANNELS // 128, 128, trips={3: 9}, loops=4,
                 take=("16 LDG",)),  # gradients of a later call
          column_sums(n // 128, 4 * CHANNELS)]),
        ("delta_forward", "the last chunk", 185e6, 430, [blocks(2, FORWARD), walk("kernel<128, 32, true>", 2)]),
        ("delta_forward", "the state alone", 130e6, 400,
         [blocks(2, FORWARD), walk("kernel<128, 32, false>", 2, NOT_SAVED)]),
        ("delta_backward", "the last chunk", 1.5e9, 1600,
         [blocks(1, FORWARD), walk("kernel<128, 32, false>", 1, NOT_SAVED), blocks(2),
          walk("kernel<128, 32, false>", 2), walk("back_kernel<128, 32>", 2),
          Launch("delta_gradient_kernel<128, true>", SEGMENT * HK, 512, 147456, {2: 8, MAIN: HV // HK, 4: 4, 6: 4}, 6,
                 times=2, some={"8 LDG, 12 MUFU": 1, "36 LDS, 1 MUFU, .* SHFL.*": 1,  # gates
                                "3 LDSM, 4 HMMA": 3, "2 LDSM, 10 HMMA": 3, "30 LDS, 20 STS, 8 MUFU": 3,  # pairs
                                "4 LDS, 16 STS": 3, "2 LDSM, 8 HMMA": 3},
                  first=("4 LDS", "4 LDG, 4 STG"))]),  # no sums of earlier heads
        ("gated_norm_forward", "value heads", 6 * n * C, 30,
         [Launch("gated_norm_forward_kernel<8, 1, false>", n * HV // 16, 256, trips={1: 4, 2: 0, 3: 0, 4: 0},
                 loops=4)]),
        ("gated_norm_backward", "value heads", 10 * n * C, 60,
         [Launch("gated_norm_backward_kernel<8, 1, false>", NORM_BLOCKS, 256,
                 trips={1: 16, 2: 4, 3: 0, 4: 0, 5: 0, 6: 0, 7: 15}, loops=7), column_sums(NORM_BLOCKS, 128)]),
        ("split_heads", "queries and gates", 8 * n * C, None,
         [Launch("split_heads_kernel<8, false>", n * 16 // 8, 256)]),
        ("gate_forward", "", 6 * n * C, None, [elements("gate_forward_kernel<8>", n * C, 8, trips={1: 4})]),
        ("gate_backward", "", 10 * n * C, None, [elements("gate_backward_kernel<8>", n * C, 8, trips={1: 4})]),
    ),
    "Nemotron-3 Nano": (
        ("ssd_forward", "the last chunk", 2 * n * (SSD_CHANNELS + SSD_VALUES), None,
         [ssd_blocks(2), ssd_walk("kernel<128, 32, true>", 2)]),
        ("ssd_forward", "the state alone", 2 * n * (SSD_CHANNELS - GROUPS * 128), None,
         [ssd_blocks(2, NO_SCORES), ssd_walk("kernel<128, 32, false>", 2, ("12 LDS, 18 STG",))]),
        ("ssd_backward", "the last chunk", 2 * n * (4 * SSD_CHANNELS + 2 * SSD_VALUES + 16 * SSD_VALUES), None,
         [ssd_blocks(3, NO_SCORES), ssd_walk("kernel<128, 32, false>", 1, ("12 LDS, 18 STG",)),
          ssd_walk("kernel<128, 32, false>", 2), ssd_blocks(2), ssd_walk("back_kernel<128, 32, true>", 2),
          Launch("ssd_gradient_kernel<128, true>", SEGMENT * GROUPS, 512, 102400,
                 {3: SSD_HEADS // GROUPS, 4: 2, 5: 4}, 5, times=2,
                 some={"35 LDS, 6 MUFU, .*": 1, "14 LDS, 8 MUFU, 16 STS": 3, "1 LDSM, 2 HMMA": 3},  # steps; pairs
                 take=("2 others", "4 LDG, 2 LDS, 6 STG, 2 MUFU"))]),  # two strips; no columns before
        ("conv_forward", "values, keys, queries", 4 * n * SSD_CHANNELS, None,
         [Launch("conv_forward_kernel<8, 4, 0>", n // 16 * SSD_CHANNELS // 1024, 128, trips={2: 4}, loops=2)]),
        ("conv_backward", "values, keys, queries", (6 + 5 * 8 / 128) * n * SSD_CHANNELS, None,
         [Launch("conv_backward_kernel<4, 4, 0, true>", n // 128 * SSD_CHANNELS // 128, 128, trips={3: 9}, loops=6,
                 take=("16 LDG",)), column_sums(n // 128, 4 * SSD_CHANNELS), column_sums(n // 128, SSD_CHANNELS)]),
        ("gated_norm_forward", "gate first", 6 * n * SSD_VALUES, None,
         [Launch("gated_norm_forward_kernel<8, 2, true>", n * GROUPS // 4, 128, loops=None)]),
    ),
    "LFM2-1.2B": (  # 2048 channels
        ("conv_backward", "with gates", (14 + 3 * 8 / 128) * n * 2048, None,
         [Launch("conv_backward_kernel<4, 4, 1, false>", n // 128 * 2048 // 128, 128, trips={3: 18}, loops=4,
                 take=("8 LDG",)), column_sums(n // 128, 3 * 2048)]),
    ),
    "gpt-oss and Gemma 4 26B-A4B": (
        ("clamped_forward", "", 6 * n * FF, None, [Launch("clamped_forward_kernel<8>", n * FF // 8 // 256, 256)]),
        ("clamped_backward", "", 10 * n * FF, None, [Launch("clamped_backward_kernel<8>", n * FF // 8 // 256, 256)]),
        ("sink_forward", "heads of 64", 4 * n * C, None,
         [Launch("sink_forward_kernel<8>", n * 2 * HEADS // 32, 256)]),
        ("sink_backward", "heads of 64", 4 * n * C, None,
         [Launch("sink_backward_kernel<8>", 2 * NORM_BLOCKS, 256, trips={1: 4, 4: 3}, loops=4),
          column_sums(NORM_BLOCKS, 2 * HEADS)]),
        ("logprob", "with its gradient, capped", 6 * LOGITS * V, None,
         [Launch("logprob_kernel<false, true>", LOGITS, 512,
                 trips={1: 37, 2: 0, 3: 9, 4: 37, 5: 0, 6: 0, 7: 0, 8: 0, 9: 0}, loops=9)]),
        ("dequantise", "a layer in mxfp4", 2.53125 * LAYER, None,
         [elements("dequantise_kernel<(DType)1, true>", LAYER, 8, trips={1: packs(LAYER, 8), 2: 0}, loops=2)]),
        ("attention_forward", "heads of 512", 4 * n * WIDE_HEADS * 512, 2048 * WIDE_HEADS * PAIRS / 250e6,
         [wide(WIDE % ("", "2, 32, 1", ", false"), 64, 32, 5, 3, (*NO_EDGE, "128 others"))]),
        ("attention_backward", "heads of 512", 8 * n * WIDE_HEADS * 512, 5120 * WIDE_HEADS * PAIRS / (145e6 * 0.76),
         [wide(WIDE % ("dq_", "4, 32, 1", ", false"), 32, 32, 5, 3, NO_EDGE),
          wide(WIDE % ("dkv_", "2, 16, 2", ""), 32, 16, 6, 4, ("18 others",))]),
    ),
    "attention by wgmma: gpt-oss, Qwen3-8B, Qwen3.5-9B": (
        hopper_backward(64, 64, 8, 420, (128, 64, 6, 16 << 10), (128, 128, 8, 16 << 10)),
        hopper_backward(128, 32, 8, 490, (128, 64, 4, 32 << 10), (128, 64, 8, 16 << 10)),
        hopper_backward(256, 16, 4, 445, (64, 64, 2, 64 << 10), (128, 64, 3, 32 << 10), (r"\d SYNCS, 16 LDS",)),
    ),
    "Qwen3-30B-A3B": [grouped(form, *widths) for form in range(3)
                      for widths in ((C_EXPERTS, 2 * I_EXPERTS), (I_EXPERTS, C_EXPERTS))] + [
        grouped_wgmma("experts_forward", WGMMA % 0, I_EXPERTS, C_EXPERTS),
        grouped_wgmma("experts_activate", "experts_activate_kernel<192, 0>", C_EXPERTS, 2 * I_EXPERTS),
        grouped_wgmma("experts_backward_input", WGMMA % 1, C_EXPERTS, 2 * I_EXPERTS),
        grouped_wgmma("experts_backward_input", WGMMA % 1, I_EXPERTS, C_EXPERTS),
        grouped_wgmma("experts_forward", WGMMA % 0, I_EXPERTS, C_EXPERTS, HALF),
        grouped_wgmma("experts_activate", "experts_activate_kernel<192, 0>", C_EXPERTS, 2 * I_EXPERTS, HALF),
        grouped_wgmma("experts_backward_input", WGMMA % 1, C_EXPERTS, 2 * I_EXPERTS, HALF)],
    "gpt-oss-20b, experts": [
        grouped_wgmma("experts_forward", WGMMA % 0, 2880, 2880, GPT_OSS),
        grouped_wgmma("experts_activate", "experts_activate_kernel<192, 3>", 2880, 5760, GPT_OSS),
        grouped_wgmma("experts_backward_input", WGMMA % 1, 2880, 5760, GPT_OSS),
        grouped_wgmma("experts_backward_input", WGMMA % 1, 2880, 2880, GPT_OSS)],
}


# ---- the table -------------------------------------------------------------------------------------------------------
def timing(kernel, launch):
    """The launch's Timing; stale: its trips or branches are not this kernel's"""
    trips = {kernel.main().number if loop == MAIN else loop: n for loop, n in launch.trips.items()}
    role = "take" if kernel.roles() else ""
    branches = sorted(Path(kernel, trips, role=role).branches)
    found = {i for i in branches if any(re.fullmatch(x, goes_around(kernel, i)) for x in launch.take)}
    branches = sorted({*branches, *Path(kernel, trips, found, role=role).branches})  # with branches after a taken one

    def matching(wanted):
        pattern, _, which = wanted.partition("#")
        found = [i for i in branches if re.fullmatch(pattern, goes_around(kernel, i))]
        return found[int(which) - 1:int(which)] if which else found

    take, first = ([matching(x) for x in patterns] for patterns in (launch.take, launch.first))
    some = {x: matching(x) for x in launch.some}
    t = Timing(kernel, trips, launch.grid, launch.threads, launch.shared, take=set(sum(take, [])),
               take_first=set(sum(first, [])), some={i: launch.some[x] for x in some for i in some[x]},
               stages=launch.stages, load=launch.load, own=launch.own)
    t.stale = not all(take + first) or not all(some.values()) or launch.loops not in (None, len(kernel.loops))
    return t


def measured():
    """{(op, of): microseconds} of the newest record of ops on an H100"""
    found = sorted((ROOT / "dev/results").glob("ops-nvidia-h100*.json"))
    rows = json.loads(found[-1].read_text())["ops"] if found else []
    return {(row["op"], row["of"]): row["ms"] * 1e3 for row in rows}


HEADER = ["| op | launches: us (blocks a multiprocessor, waves) | simulated | bytes | floor | predicted | measured | "
          "measured / floor |",
          "|---|---|---|---|---|---|---|---|"]


def table_row(kernels, op, of, size, predicted, launches, measured_us):
    parts, simulated, stale = [], 0, False
    for launch in launches:
        if launch.kernel not in kernels:
            stale = True
            continue
        t = timing(kernels[launch.kernel], launch)
        stale, simulated = stale or t.stale, simulated + launch.times * t.us
        name = re.sub("_kernel.*", "", launch.kernel)
        parts.append(f"{f'{launch.times} x ' if launch.times > 1 else ''}{name} {t.us:.0f} ({t.blocks}, {t.waves:.1f})")
    memory = size / DRAM * 1e6
    floor, guess = max(simulated, memory), predicted or memory / 0.85
    mark = "**" if floor > guess else ""
    return (f"| {op}{', ' + of if of else ''} | {', '.join(parts)}{' **stale**' if stale else ''} | {simulated:.0f} | "
            f"{memory:.0f} | {mark}{floor:.0f}{mark} | {guess:.0f} | " +
            (f"{measured_us:.0f} | {measured_us / floor:.2f} |" if measured_us else "| |"))


def print_table(data, write):
    """Prints the table, or replaces that of dev/gpu_floors.md"""
    wanted = {launch.kernel for rows in PASS.values() for row in rows for launch in row[4]}
    kernels = {kernel.name: kernel for kernel in read_kernels(data, lambda name: name in wanted)}
    times = measured()
    table = HEADER + [table_row(kernels, *row, times.get(row[:2])) for rows in PASS.values() for row in rows]
    if not write:
        return print("\n".join(table))
    file = ROOT / "dev/gpu_floors.md"
    lines = file.read_text().splitlines()
    begin = lines.index(HEADER[0])
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
    file.write_text("\n".join(lines[:begin] + table + lines[end:]) + "\n")


# ---- the tests' record of loops --------------------------------------------------------------------------------------
# Parts of mangled names
HEAVIEST = ("delta_walk_kernelILi128E", "delta_walk_back_kernelILi128E", "delta_gradient_kernelILi128E",
            "delta_blocks_kernel", "ssd_walk_kernelILi128E", "ssd_walk_back_kernelILi128E",
            "ssd_gradient_kernelILi128E", "ssd_blocks_kernel", "conv_backward_kernelILi4ELi4E",
            "20norm_backward_kernelILi8ELi4ELb0E",
            "logprob_kernelILb0ELb0E", "adamw_8_bits_kernelIf4Bf16Li4E", "attention_dkv_kernelILi128E",
            "ProductTileLi128ELi128ELi64ELi64ELi3E",
            "attention_forward_kernelILi128EXtl5TilesLj64ELj32ELj2EEELb0E", "attention_wide_dkv_kernelILi512E",
            "attention_wide_dq_kernelILi512EXtl9WideTilesLi4ELi32ELi1EEELb0E",
            "attention_wide_kernelILi512EXtl9WideTilesLi2ELi32ELi1EEELb0E",
            "experts_wgmma_kernelIL11ProductForm0ELi192E", "experts_activate_kernelILi192ELi0E",
            "experts_activate_kernelILi192ELi3E",
            "attention_dkv_hopper_kernelILi128E", "attention_dq_hopper_kernelILi128ELb0E",
            "attention_split_kernelILi128EXtl10SplitTilesLj4ELj1ELj2EEELb0E", "attention_received_kernelILi128E")
MOST_GROWTH, LEAST, LEAST_NEW = 0.03, 50, 100  # instructions: of loops that are recorded, of new ones that are too many


def loops_of(kernel):
    return sorted((len(loop.body) for loop in kernel.loops if len(loop.body) >= LEAST), reverse=True)


def complaint(kernel, spills, before):
    """What is worse than recorded, or None"""
    if kernel.spills > 0 and not spills:
        return f"{kernel.spills} local loads and stores, none before"
    for old, new in itertools.zip_longest(before, loops_of(kernel), fillvalue=0):
        if old and new > old * (1 + MOST_GROWTH):
            return f"a loop of {old} instructions has {new}"
        if not old and new >= LEAST_NEW:
            return f"a new loop of {new} instructions"
    return None


def check_loops(path, write):
    """Compares loops of the heaviest kernels with a file of lines `kernel: spills: instructions of loops`"""
    path, compiler = pathlib.Path(path), compiler_version()
    lines = path.read_text().splitlines() if path.exists() else [""]
    if not compiler or not write and lines[0] != "# " + compiler:
        reason = f"no {lines[0][2:]}" if compiler else "no nvcc"
        print(f"[  SKIPPED ] NOT TESTED, because there is {reason}\n0 passed, 0 failed, 1 skipped")
        return 0
    kernels = read_kernels(compiled(HEAVIEST), lambda name: any(part in name for part in HEAVIEST))
    if write:
        rows = sorted(f"{k.name}: {k.spills}: {' '.join(map(str, loops_of(k)))}".rstrip() for k in kernels)
        path.write_text("\n".join(["# " + compiler] + rows) + "\n")
        return 0
    recorded = {name: (int(spills), [int(x) for x in loops.split()])
                for name, spills, loops in (line.rsplit(":", 2) for line in lines[1:])}
    worse = [(k.name, complaint(k, *recorded[k.name]) if k.name in recorded else "not recorded") for k in kernels]
    worse += [(name, "gone") for name in recorded if name not in [k.name for k in kernels]]
    worse = [(name, text) for name, text in worse if text]
    for name, text in worse:
        print(f"FAILED: {name}: {text}; mend it, or record it: dev/cuda/cycles.py --check {path} --write")
    print(f"{len(kernels) - len(worse)} passed, {len(worse)} failed, 0 skipped")
    return len(worse) > 0
