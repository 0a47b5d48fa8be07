"""Machine code of a cubin for sm_90a: kernels, instructions with their control words, loops, and the path of a warp.

Needs no disassembler. An instruction has 128 bits. Its lowest 9 name the operation; bits 105 to 121 are what ptxas
tells the scheduler: cycles until the next issue (4 bits), yield, the scoreboards that are released when the result is
written and when the operands are read (3 bits each, 7: none), and a mask of scoreboards to wait for (6 bits).

HGMMA is a warp's quarter of wgmma.m64nNk16: a multiprocessor does 2048 bf16 multiply-adds a cycle, so N / 2 cycles. Its
group reads B, and A if A is not in registers, from shared memory: 128 bytes a cycle, N / 4 and 16 cycles.
"""
import re, shutil, struct, subprocess

# Operation: name, pipe, cycles of that pipe for 32 lanes, cycles from there to a result under a scoreboard. `lsu`
# serves four schedulers: cycles are a scheduler's share for 4 bytes a lane.
OPERATIONS = {}
for pipe, cycles, latency, names in (
        ("alu", 2, 6, "03:P2R 04:R2P 05:CS2R 06:VOTE 07:SEL 08:FSEL 09:FMNMX 0b:FSETP 0c:ISETP 10:IADD3 11:LEA 12:LOP3 "
                      "13:IABS 14:BMSK 16:PRMT 17:IMNMX 19:SHF 1a:I2I 1b:SGXT 1c:PLOP3 36:VIADD 3e:F2FP 45:I2FP "
                      "46:VIADDMNMX 48:VIMNMX"),
        ("fma", 1, 6, "02:MOV 20:FMUL 21:FADD 23:FFMA"),
        ("imad", 2, 6, "24:IMAD 25:IMAD 27:IMAD 30:HADD2 31:HFMA2 32:HMUL2 35:HFMA2"),
        ("fp64", 2, 40, "28:DMUL 29:DADD 2a:DSETP 2b:DFMA"),
        ("hmma", 6, 33, "3c:HMMA 1f0:HGMMA"),
        ("xu", 8, 23, "100:FLO 102:FCHK 104:F2F 105:F2I 106:I2F 108:MUFU 109:POPC 110:F2F 111:F2I 112:I2F 113:FRND"),
        ("lsu", 4, 33, "3b:LDSM 44:STSM 183:LDL 184:LDS 188:STS"),  # what was spilled is in L1
        ("lsu", 4, 25, "189:SHFL"),
        ("lsu", 4, 20, "185:ST 186:STG 187:STL"),
        ("lsu", 4, 25, "1a7:SYNCS 1b2:SYNCS"),
        ("lsu", 4, 40, "18f:CCTL"),
        ("lsu", 4, None, "180:LD 181:LDG 18e:RED 1a8:ATOMG 1ae:LDGSTS"),  # None: the memory's
        ("tma", 4, 20, "1b4:UTMALDG 1b5:UTMASTG 1b7:UTMACMDFLUSH 1b9:UTMACCTL 1ba:UBLKCP"),
        ("constant", 4, 35, "119:S2R 182:LDC 1af:LDGDEPBAR 1c3:S2UR"),
        ("uniform", 1, 12, "82:UMOV 83:UP2UR 86:VOTEU 87:USEL 8c:UISETP 90:UIADD3 91:ULEA 92:ULOP3 96:UPRMT 99:USHF "
                           "9c:UPLOP3 a4:UIMAD a5:UIMAD b9:ULDC bb:ULDC ca:R2UR 1c2:REDUX"),
        ("control", 1, 20, "2f:ELECT 118:NOP 11a:DEPBAR 11b:ENDCOLLECTIVE 11d:BAR 141:BSYNC 142:BREAK 144:CALL "
                           "145:BSSY 146:YIELD 147:BRA 148:WARPSYNC 149:BRX 14a:JMP 14d:EXIT 150:RET 151:YIELD "
                           "192:MEMBAR 1ab:ERRBAR 1c5:WARPGROUP 1c6:FENCE 1c7:UCGABAR 1c8:USETMAXREG")):
    for code, name in (pair.split(":") for pair in names.split()):
        OPERATIONS[int(code, 16)] = (name, pipe, cycles, latency)
PIPES = tuple(dict.fromkeys(pipe for _, pipe, _, _ in OPERATIONS.values()))
NO_PREDICATE, BRANCH, NONE = 7, 0x147, 7
LOADS = ("UTMALDG", "UBLKCP")  # of tiles, into shared memory


class Instruction:
    def __init__(self, index, low, high):
        operation, self.index = low & 0x1FF, index
        self.name, self.pipe, self.cycles, self.latency = OPERATIONS.get(operation, (f"0x{operation:x}", "alu", 2, 6))
        control = high >> 41
        self.stall, self.write, self.read = control & 15 or 1, control >> 5 & 7, control >> 8 & 7
        self.wait = [board for board in range(6) if control >> 11 & 1 << board]
        self.conditional = low >> 12 & 15 != NO_PREDICATE
        self.never = low >> 12 & 15 == 15
        self.target = None
        if operation == BRANCH:
            words = (low >> 16 & 0xFF) | (low >> 34 | (high & 0x3FFFF) << 30) << 8  # a distance in words of 4 bytes
            self.target = index + 1 + ((words - (1 << 56) if words >> 55 else words) >> 2)
            self.diverging = high >> 24 & 15 == 11  # BRA.DIV, to code that warps do not reach
            self.conditional = self.conditional or self.diverging or high >> 23 & 15 != NO_PREDICATE
        if self.name == "DEPBAR":
            self.board, self.left = low >> 44 & 7, low >> 38 & 63
        self.shared = 0  # cycles in which a product reads shared memory
        self.flops = 4 * 4096 if self.name == "HMMA" else 0  # of four schedulers
        if self.name in ("LDSM", "STSM"):
            self.cycles <<= high >> 8 & 3
        elif self.pipe == "lsu" and self.name not in ("SHFL", "SYNCS"):
            self.cycles *= {5: 2, 6: 4}.get(high >> 9 & 7, 1)  # 64 and 128 bits
        self.read_hopper(low, high)
        self.narrow = self.name in ("LDG", "STG") and high >> 9 & 7 < 4  # at most 16 bits
        if self.never:
            self.cycles, self.latency = 0, 0

    def read_hopper(self, low, high):
        """kind: HGMMA's "last" of a group, "wait" for groups with at most `left` in flight; a barrier's "arrive",
        "expect", "wait"; a load's "multicast"; "give" or "take" of registers. threads: that a BAR counts, 0: the block's"""
        self.kind, self.threads, self.key, form = "", 0, 0, low >> 9 & 7
        if self.name == "HGMMA":
            n = 8 * ((low >> 53 & 31) + 1)
            self.kind, self.flops = "" if high >> 20 & 7 == NONE else "last", 2 * 64 * n * 16
            self.shared = n // 4 + (16 if form == 4 else 0)
            self.cycles = max(n // 2, self.shared)
        elif self.name == "WARPGROUP":
            self.kind, self.left = "wait" if high >> 16 & 1 else "", high >> 8 & 7
        elif self.name == "SYNCS" and low & 0x1FF == 0x1A7:
            self.kind = "wait" if high >> 8 & 1 else "arrive" if high >> 20 & 1 else "expect"
        elif self.name == "UTMALDG":
            self.kind = "multicast" if form == 1 else ""
        elif self.name == "USETMAXREG":
            self.kind = "give" if high >> 8 & 1 else "take"
        elif self.name == "BAR":
            self.kind, self.threads = "arrive" if high >> 13 & 1 else "", low >> 42 & 0xFFF if form in (2, 5) else 0
            self.key = low >> 54 & 15 if form == 5 else -1  # -1: a register's


def instructions(text):
    words = struct.unpack(f"<{len(text) // 8}Q", text)
    return [Instruction(i, *words[2 * i:2 * i + 2]) for i in range(len(words) // 2)]


# ---- kernels of a cubin ----------------------------------------------------------------------------------------------
class Kernel:
    """name, symbol, registers, stack (bytes), shared (static, bytes), code, loops"""

    def __init__(self, symbol, text, facts, shared):
        self.symbol, self.code = symbol, instructions(text)
        self.registers, self.stack, self.shared = facts.get((0x2F, symbol), 0), facts.get((0x11, symbol), 0), shared
        self.loops = find_loops(self.code)
        self.spills = sum(x.name in ("LDL", "STL") for x in self.code)

    def main(self):
        """The largest outermost loop"""
        return max((loop for loop in self.loops if not loop.around), key=lambda loop: len(loop.body), default=None)

    def roles(self):
        """Tells whether one warp group gives registers and others take them"""
        return {"give", "take"} <= {x.kind for x in self.code if x.name == "USETMAXREG"}

    def toward(self, role):
        """Indices from which the next USETMAXREG can be one of that kind"""
        return self.leading_to([x.index for x in self.code if x.name == "USETMAXREG" and x.kind == role],
                               lambda i, j: self.code[i].name != "USETMAXREG")

    def toward_work(self, loop):
        """Indices from which a trip of the loop (None: the kernel) leads to a product of a warp group or a load for it"""
        back = {(i, other.head) for other in self.loops for i in other.jumps}
        body = loop.body if loop else range(len(self.code))
        return self.leading_to([i for i in body if self.code[i].name in ("HGMMA", *LOADS)],
                               lambda i, j: (i, j) not in back and i in body and j in body)

    def leading_to(self, goals, counts):
        """Indices from which edges that count lead to a goal"""
        before = {}
        for i in range(len(self.code)):
            for j in successors(self.code, i):
                if counts(i, j):
                    before.setdefault(j, []).append(i)
        found, todo = set(), goals
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += before.get(i, [])
        return found


def text_at(data, at):
    return data[at:data.index(b"\0", at)].decode()


def sections_of(data):
    """{name: (bytes, size)} of an ELF file's sections"""
    start, = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    return {text_at(data, heads[names][4] + name): (data[at:at + length] if kind != 8 else b"", length)  # 8: no bits
            for name, kind, _, _, at, length in heads}


def facts_of(sections):
    """{(attribute, symbol): value} of .nv.info"""
    strings, symbols, info = (sections[name][0] for name in (".strtab", ".symtab", ".nv.info"))
    names = [text_at(strings, struct.unpack_from("<I", symbols, at)[0]) for at in range(0, len(symbols), 24)]
    facts, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == 4 and size == 8:
            symbol, value = struct.unpack_from("<II", info, at + 4)
            facts[attribute, names[symbol]] = value
        at += 4 + (size if form == 4 else 0)
    return facts


def short_names(symbols):
    """Names as in the source, without types of arguments; as in the file where c++filt is missing"""
    if not shutil.which("c++filt"):
        return symbols
    out = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    names = []
    for name in out.splitlines():
        name = re.sub(r"\((anonymous namespace|unsigned int|int|bool|unsigned long)\)(::)?", "", name)
        depth = 0
        for i, letter in enumerate(name):  # up to the arguments
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                name = name[:i]
                break
        names.append(name.removeprefix("void "))
    return names


def read_kernels(data, wanted=lambda name: True):
    """Kernels of a cubin's bytes with a wanted name"""
    sections = sections_of(data)
    facts = facts_of(sections)
    symbols = [name[6:] for name in sections if name.startswith(".text.")]
    shared = {symbol: sections.get(".nv.shared." + symbol, (b"", 0))[1] for symbol in symbols}
    reserved = 1024 if min(shared.values(), default=0) >= 1024 else 0  # CUDA 13 counts the system's part, 12 does not
    kernels = []
    for symbol, name in zip(symbols, short_names(symbols)):
        if wanted(name) or wanted(symbol):
            kernels.append(Kernel(symbol, sections[".text." + symbol][0], facts, shared[symbol] - reserved))
            kernels[-1].name = name
    return kernels


# ---- loops -----------------------------------------------------------------------------------------------------------
class Loop:
    """number (from 1, by address), head, latch (the last jump back), jumps (all of them), body (indices), around
    (loops), endless (it is left from within)"""

    def __init__(self, head):
        self.head, self.body, self.jumps = head, {head}, set()


def successors(code, i):
    x = code[i]
    if x.target is not None:
        return [i + 1, x.target] if x.conditional else [x.target]
    return [i + 1] if x.conditional or x.name not in ("EXIT", "RET", "BRX", "JMP") else []


def jumps_back(code):
    """Edges to an instruction from which the search came, and all edges backwards: {to: [from]}"""
    state, back, before = {0: "open"}, [], {}
    stack = [(0, iter(successors(code, 0)))]
    while stack:
        i, following = stack[-1]
        for j in following:
            if j >= len(code):
                continue
            before.setdefault(j, []).append(i)
            if state.get(j) == "open" and j != i:
                back.append((i, j))
            elif j not in state:
                state[j] = "open"
                stack.append((j, iter(successors(code, j))))
                break
        else:
            state[i] = "done"
            stack.pop()
    return back, before


def find_loops(code):
    back, before = jumps_back(code)
    loops = {}
    for latch, head in back:
        loop = loops.setdefault(head, Loop(head))
        loop.jumps.add(latch)
        todo = [latch]
        while todo:
            i = todo.pop()
            if i not in loop.body:
                loop.body.add(i)
                todo += before.get(i, [])
    loops = sorted(loops.values(), key=lambda loop: (loop.head, -len(loop.body)))
    for number, loop in enumerate(loops, 1):
        loop.number, loop.latch = number, max(loop.jumps)
        loop.endless = any(not code[i].conditional for i in loop.jumps)
        loop.around = [other for other in loops if other is not loop and loop.head in other.body and
                       len(other.body) > len(loop.body)]
    return loops


# ---- the path of a warp ----------------------------------------------------------------------------------------------
class Path:
    """Indices of the instructions of one warp. Forward branches fall through. Taken are those around a call, around a
    loop of no trips, and around rows that are copied element by element. trips: {loop: trips}, else 1. take,
    take_first: branches that are taken, or in the first trip of their loop alone. role: "give" or "take", of a warp
    that goes where its group gives or takes registers, then where there are products or loads of tiles."""
    MOST = 2000000  # instructions

    def __init__(self, kernel, trips, take=(), take_first=(), role=""):
        self.code, self.loops, self.trips = kernel.code, kernel.loops, trips
        self.take, self.take_first = take, take_first
        self.toward, self.work = kernel.toward(role) if role else set(), {}
        self.toward_work = kernel.toward_work if role else lambda loop: set()
        self.heads = {loop.head: loop for loop in kernel.loops}
        self.done = dict.fromkeys(range(1, len(kernel.loops) + 1), 0)
        self.branches = {}  # forward ones on the way: taken how often, of how many times
        self.inner, self.around, self.indices = {}, {}, []
        i = 0
        while i is not None and i < len(self.code) and len(self.indices) < self.MOST:
            self.indices.append(i)
            i = self.next(i)
        if len(self.indices) == self.MOST:
            raise ValueError(f"{kernel.name}: the path has more than {self.MOST} instructions; give fewer --trips")

    def next(self, i):
        x = self.code[i]
        if x.target is None:
            ends = x.name in ("EXIT", "RET") and (not x.conditional or self.leaves(self.innermost(i)))
            return None if ends else i + 1
        head = self.heads.get(x.target)
        if head and i in head.jumps:
            return self.jump_back(i, head)
        if not x.conditional:
            return x.target
        taken = self.takes(i, x)
        count = self.branches.setdefault(i, [0, 0])
        count[0] += taken
        count[1] += 1
        return x.target if taken else i + 1

    def jump_back(self, i, loop):
        n = self.trips.get(loop.number, 1)
        if self.code[i].conditional and (i != loop.latch or self.done[loop.number] + 1 >= n):
            if i == loop.latch:
                self.done[loop.number] = 0
            return i + 1
        self.done[loop.number] += 1
        for inner in self.loops:
            if loop in inner.around:
                self.done[inner.number] = 0
        return loop.head

    def innermost(self, i):
        if i not in self.inner:
            inside = [loop for loop in self.loops if i in loop.body]
            self.inner[i] = min(inside, key=lambda loop: len(loop.body), default=None)
        return self.inner[i]

    def takes(self, i, x):
        loop = self.innermost(i)
        if x.diverging:
            return False
        if (i + 1 in self.toward) != (x.target in self.toward):
            return x.target in self.toward
        if loop and i in self.take_first:
            return self.done[loop.number] == 0
        if loop and (x.target in loop.body) != (i + 1 in loop.body):  # stays in the loop until its trips are done
            leaves = self.leaves(loop)
            if leaves:
                self.done[loop.number] = 0
            return (x.target in loop.body) != leaves
        if loop not in self.work:
            self.work[loop] = self.toward_work(loop)
        if i not in self.take and (i + 1 in self.work[loop]) != (x.target in self.work[loop]):
            return x.target in self.work[loop]
        return i in self.take or self.goes_around(i, x.target)

    def leaves(self, loop):
        return bool(loop) and loop.endless and self.done[loop.number] >= self.trips.get(loop.number, 1)

    def goes_around(self, i, to):
        if i not in self.around:
            code = self.code[i + 1:to]
            skipped = [loop for loop in self.loops if i < loop.head and loop.latch < to]
            outer = [loop for loop in skipped if not any(other in skipped for other in loop.around)]
            narrow = [x.narrow for x in code if x.name in ("LDG", "STG", "LDGSTS")]
            elements = sum(narrow) >= 4 and narrow[0]  # where packs come first, this is around both ways
            self.around[i] = (any(x.name == "CALL" for x in code[:24]) or
                              elements and sum(narrow) >= 0.8 * len(narrow) and all(x.pipe != "xu" for x in code) or
                              bool(outer) and all(self.trips.get(loop.number, 1) == 0 for loop in outer))
        return self.around[i]

    def trip(self, loop):
        """The last whole trip of a loop on the path"""
        starts = [n for n, i in enumerate(self.indices) if i == loop.head]
        if not starts:
            return []
        end = starts[-1] + 1
        while end < len(self.indices) and self.indices[end] in loop.body and self.indices[end] != loop.head:
            end += 1
        return self.indices[starts[-1]:end]
