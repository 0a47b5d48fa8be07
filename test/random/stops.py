#!/usr/bin/env python3
"""Stops runs of ./train at random moments, resumes them, and holds their bits against those of a run that was not stopped.

    make && test/random/stops.py [--runs 300] [--seed 1] [--kinds sft,lora,...] [--jobs 2] [--only N]

A run has one of ten kinds, and a seed of its own: --only repeats one. A part of it is stopped by SIGINT, SIGTERM, SIGHUP or SIGUSR1
at a random moment with a random --grace, some times by a second signal or by kill -9; then it goes on, by the command that it printed
or with --resume auto. Checked of each part: its exit code, and that no step it had printed is lost; of the whole: model or adapter and
optimizer to the bit, one record of each step in log.jsonl with the same loss, no half-written file, no process left. Linux, mpirun of
Open MPI; as root a full disk is a small tmpfs, else a limit on file sizes.
"""
import argparse, collections, concurrent.futures, json, os, pathlib, random, re, resource, shlex, shutil, signal, subprocess, sys, tempfile
import threading, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "train")
SHARD = str(ROOT / "test/golden/tokens_uint16.bin")
SIZES = "hidden_size=128,intermediate_size=256,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,vocab_size=96"
LLAMA, QWEN = "llama," + SIZES, "qwen3,head_dim=32," + SIZES
WIDE = "llama,hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=30000"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 0}
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "--mca", "odls_base_sigkill_timeout", "4",
          "-n", "2"]
TIMEOUT = 120  # s of any wait


def variants(made):
    """The command lines of each kind, without --out, --grace and what resumes."""
    data = ["--data", SHARD, "--seq-len", "256", "--chunk", "100", "--lr", "1e-3", "--warmup", "3", "--threads", "1", "--seed", "7"]
    steps, sums = ["--steps", "16"], ["--grad-accum", "3"]
    val = ["--val-data", SHARD, "--val-steps", "2", "--val-every", "4"]
    lora = ["--lora-rank", "4"]
    pairs = ["--data", f"{made}/pairs.bin", "--seq-len", "64", "--samples", "4", "--objective", "dpo", "--lr", "1e-3", "--threads", "1"]
    grpo = ["--data", f"{made}/prompts.bin", "--rollout", "--overlap", "--objective", "grpo", "--group-size", "6", "--seq-len", "32",
            "--batch", "4", "--max-new-tokens", "4", "--lr", "1e-3", "--threads", "1", "--reward-command", f"sh {made}/reward.sh"]
    disk = ["--optimizer", "disk", "--inputs", "host", "--update", "forward", "--disk", str(made)]
    save = ["--data", SHARD, "--any-tokenizer", "--seq-len", "32", "--lr", "1e-3", "--threads", "1", "--steps", "12"]
    sft = ["--init", LLAMA] + data + steps
    return {
        "sft": [sft + sums, sft + val + ["--keep-best", "--save-every", "1s"], sft + val + ["--sample-every", "3", "--prompt-ids", "1,2"]],
        "lora": [sft + sums + lora, sft + val + lora + ["--lora-dropout", "0.1", "--save-every", "5"]],
        "qlora": [["--init", QWEN] + data + steps + more + lora + ["--base", "nf4"] for more in (sums, val)],
        "dpo": [["--init", LLAMA] + pairs + ["--steps", "30"] + more for more in ([], lora, ["--save-every", "4"])],
        "grpo": [["--init", LLAMA] + grpo + ["--steps", "20"] + more
                 for more in ([], ["--updates", "2"], lora, ["--val-data", f"{made}/prompts.bin", "--val-every", "3"])],
        "ranks": [sft + ["--grad-accum", "4"] + more for more in (["--zero", "2"], ["--zero", "3"] + val, ["--sp", "2"], ["--save-every", "3"])],
        "places": [sft + sums + disk, sft + disk + ["--weights", "host", "--gradients", "host"], sft + sums + lora + disk + val],
        "save": [["--init", WIDE] + save + ["--save-every", "1"]],
        "full": [["--init", WIDE] + save + ["--save-every", "2"]],
        "deleted": [sft + sums + ["--save-every", "4"], sft + val],
    }


def prepare(made):
    program = made / "make_documents"
    subprocess.run(["cc", "-D_GNU_SOURCE", "-O1", "-I.", "test/data/make_documents.c", "-lm", "-o", program], cwd=ROOT, check=True)
    subprocess.run([program, made / "pairs.bin", "96", "40,64,51,33,60,45,58,20", "4", "10", "pairs"], check=True)
    subprocess.run([program, made / "prompts.bin", "96", "5,9,3,7,12,4,6,8", "3", "0", "prompts"], check=True)
    (made / "reward.sh").write_text("""n=0
while read -r line; do
    n=$((n + 1))
    [ $((n % 24)) != 0 ] || sleep 0.03
    case $line in *'"completion_ids": ['[1-4]*) echo 1 ;; *) echo 0 ;; esac
done
""")


class Fault(Exception):
    pass


def signals_as_usual():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def limited_files():
    signals_as_usual()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, resource.RLIM_INFINITY))


def children(process):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


class Part:
    """A process of ./train, alone or under mpirun, whose output is read as it comes."""

    def __init__(self, command, begin=signals_as_usual):
        self.command, self.text, self.errors, self.step, self.seen = command, [], [], 0, threading.Event()
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        errors="replace", env=environment, start_new_session=True, preexec_fn=begin, cwd=ROOT)
        self.readers = [threading.Thread(target=self.read, args=ends, daemon=True)
                        for ends in ((self.process.stdout, []), (self.process.stderr, self.errors))]
        for reader in self.readers:
            reader.start()

    def read(self, stream, lines):
        for line in stream:
            self.text.append(line.rstrip("\n"))
            lines.append(line.rstrip("\n"))
            found = re.match(r"step +(\d+)/\d+  (?:loss|reward) ", line)
            if found:
                self.step = int(found.group(1))
            self.seen.set()

    def until(self, step, seconds):
        """Waits until a step has ended, or the process has."""
        end = time.monotonic() + seconds
        while self.step < step and self.process.poll() is None and time.monotonic() < end:
            self.seen.wait(0.005)
            self.seen.clear()

    def ranks(self):
        return [child for child in children(self.process.pid)] if self.command[0] == "mpirun" else [self.process.pid]

    def send(self, number, to=None):
        try:
            os.kill(to or self.process.pid, number)
        except ProcessLookupError:
            pass

    def end(self):
        group = self.process.pid
        try:
            code = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(group, signal.SIGKILL)
            raise Fault(f"still there after {TIMEOUT} s")
        for reader in self.readers:
            reader.join(5)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return code
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)
        raise Fault("processes are left after its end")

    def says(self, pattern):
        return any(re.search(pattern, line) for line in self.text)


def saved_step(folder):
    steps = [int(path.parent.name[-8:]) for path in folder.glob("checkpoint-????????/DONE")]
    return max(steps, default=0)


def records(folder):
    """{step: loss} of the log; a step that is there twice is a fault."""
    found, validations = {}, collections.Counter()
    for line in open(folder / "log.jsonl"):
        record = json.loads(line)
        if "loss" in record:
            if record["step"] in found:
                raise Fault(f"log.jsonl has step {record['step']} twice")
            found[record["step"]] = record["loss"]
        if "val_loss" in record or "val_reward" in record:
            validations[record["step"]] += 1
    twice = [step for step, count in validations.items() if count > 1]
    if twice:
        raise Fault(f"log.jsonl has the validation of step {twice[0]} twice")
    return found, sorted(validations)


def compare(kind, straight, folder, steps):
    name = f"checkpoint-{steps:08d}"
    for file in sorted((straight / name).iterdir()):
        if file.name.endswith((".bin", ".safetensors")) and file.read_bytes() != (folder / name / file.name).read_bytes():
            raise Fault(f"{file.name} has other bits")
    losses, validations = records(straight)
    others, other_validations = records(folder)
    if kind == "deleted":  # the log begins again
        losses = {step: loss for step, loss in losses.items() if step in others}
        validations = [step for step in validations if step in other_validations]
    if list(others) != sorted(others):
        raise Fault("log.jsonl is not in the order of steps")
    if losses != others:
        raise Fault(f"log.jsonl has other steps or losses: {sorted(set(losses.items()) ^ set(others.items()))[:4]}")
    if validations != other_validations:
        raise Fault(f"log.jsonl has validations of steps {other_validations}, not {validations}")
    left = [path for path in folder.rglob("*") if re.search(r"\.(partial|removed|tmp)$", path.name)]
    if left:
        raise Fault(f"{left[0].name} is left")


def printed_command(part):
    """The command that goes on, as the run printed it: lines that end with a backslash are one."""
    for i, line in enumerate(part.errors):
        if re.match("go on with", line):
            text = ""
            for more in part.errors[i + 1:]:
                text += more.rstrip("\\") if more.endswith("\\") else more
                if not more.endswith("\\"):
                    return shlex.split(text)
    return None


class Run:
    def __init__(self, kind, number, args, straight, folder, draw, steps, seconds):
        self.kind, self.number, self.args, self.straight, self.folder, self.draw = kind, number, args, straight, folder, draw
        self.steps, self.seconds, self.story, self.stops = steps, seconds, [], 0
        self.launcher = MPIRUN if kind == "ranks" else []
        self.part = None

    def begin(self, command=None, begin=signals_as_usual):
        resume = ["--resume", "auto"] if self.stops or self.draw.random() < 0.3 else []
        grace = ["--grace", self.draw.choice(["0", "0", "0.05", "20"])]
        command = command or [TRAIN, "train"] + self.args + ["--out", str(self.folder)] + resume + grace
        self.part = Part(self.launcher + command, begin)

    def moment(self):
        """Waits for a random moment of what is left: a step's line, then a share of a step."""
        first = saved_step(self.folder)
        step = self.draw.randint(first, self.steps)
        self.part.until(step if step > first else 0, TIMEOUT)
        rest = self.draw.uniform(0, 1.3 * self.seconds if step > first else 3 * self.seconds + (1.5 if self.launcher else 0.1))
        if self.kind == "save":
            rest = self.draw.uniform(0, 0.3)
        try:
            self.part.process.wait(rest)
        except subprocess.TimeoutExpired:
            pass

    def stop(self):
        """A part, stopped; returns the command it printed."""
        draw, part, kind = self.draw, self.part, self.kind
        before = saved_step(self.folder)
        number, kill, again = draw.choice(list(CODES)), draw.random() < 0.3, draw.random() < 0.12
        deletes = kind == "deleted" and (draw.random() < 0.7 or not self.stops)
        to = None
        self.moment()
        if deletes:
            taken = self.folder.with_name(f"{self.folder.name}-gone{self.stops}")
            if draw.random() < 0.5 and self.folder.exists():
                self.folder.rename(taken)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.story.append(f"deleted at step {part.step}")
            before = 0
            if draw.random() < 0.5:
                part.until(part.step + 1, TIMEOUT)
        if self.launcher:
            ranks = part.ranks()
            to = draw.choice([None] + ranks) if ranks else None
            if to is None:
                number = draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        where = "" if not self.launcher else " to mpirun" if to is None else f" to {'a rank'}"
        if kind == "save" and kill:
            number, again = signal.SIGKILL, False
        sent = part.process.poll() is None
        printed = part.step
        part.send(number, to)
        if again:
            time.sleep(draw.uniform(0, 0.05))
            part.send(draw.choice(list(CODES)), to)
        code = part.end()
        self.stops += 1
        after = saved_step(self.folder)
        self.story.append(f"{signal.Signals(number).name}{where}{' twice' if again else ''} at step {printed}, code {code}, step {after} saved")
        if part.says("Sanitizer|corrupted|runtime error|Segmentation|Assertion"):
            raise Fault("memory")
        heard = part.says("finishing this step and saving it")
        listened = heard or part.step
        if number == signal.SIGKILL:
            wanted = (-9, 0)
        elif not sent:
            wanted = (0,)
        elif self.launcher:
            wanted = None if to is None or again or not listened else (CODES[number],)
        elif again:
            wanted = None
        else:
            wanted = (CODES[number] if heard else -number,)
        if wanted and part.step == self.steps:  # the signal may arrive after the end
            wanted += (0,)
        if wanted and deletes and part.says("^train: .*(No such file|was removed)"):  # within a save
            wanted = (1,)
        if wanted and code not in wanted:
            raise Fault(f"exit code {code} in place of {wanted}")
        if code == -number and listened and not again and number != signal.SIGKILL and part.step != self.steps:
            raise Fault("a run that listens was ended")
        if deletes and (code == 1 or part.says("^ended") and not part.says("is made again")):  # within a save, or after the end
            return None
        lost = part.step
        if number == signal.SIGKILL or again:
            lost = before
        elif "--save-every" in self.args and before > lost:
            lost = before
        if after < lost:
            raise Fault(f"step {part.step} was printed, step {after} is saved")
        if heard and number != signal.SIGKILL and not again and not part.says("^stopped by|^ended"):
            raise Fault("it does not say where it stopped")
        command = printed_command(part) if not again else None
        if heard and not again and to is not None and after and after < self.steps and not command:
            raise Fault("it does not print the command that goes on")
        return command if draw.random() < 0.5 else None

    def fill(self):
        """A part whose disk becomes full."""
        draw, part, before = self.draw, self.part, saved_step(self.folder)
        self.moment()
        filler, limited = self.folder.parent / "filler", not self.folder.parent.is_mount()
        if not limited:
            file = os.open(filler, os.O_WRONLY | os.O_CREAT)
            try:
                while os.write(file, bytes(1 << 16)):
                    pass
            except OSError:
                pass
            os.close(file)
        number = draw.choice(list(CODES))
        if draw.random() < 0.7:
            part.until(part.step + draw.randint(0, 3), TIMEOUT)
            part.send(number)
        code = part.end()
        self.stops += 1
        if filler.exists():
            filler.unlink()
        after = saved_step(self.folder)
        self.story.append(f"full at step {part.step}, code {code}, step {after} saved")
        if code not in (0, 1, -number, CODES[number]):
            raise Fault(f"exit code {code}")
        if code == 1 and len([line for line in part.text if line.startswith("train: ")]) != 1:
            raise Fault("not one line of error")
        if after < before:
            raise Fault(f"step {before} was saved, now it is {after}")
        if code == CODES[number] and part.says("^stopped by") and after < part.step:
            raise Fault(f"step {part.step} was printed, step {after} is saved")

    def go(self):
        command = None
        for _ in range(self.draw.choice([1, 1, 2, 3])):
            if saved_step(self.folder) == self.steps:
                break  # of a validation that is left the last part sees to
            if self.kind == "full":
                self.begin(command, signals_as_usual if self.folder.parent.is_mount() else limited_files)
                self.fill()
            else:
                self.begin(command)
                command = self.stop()
        if saved_step(self.folder) < self.steps or "--val-data" in self.args:
            self.begin(command)
            code = self.part.end()
            self.story.append(f"to the end{', by the printed command' if command else ''}, code {code}")
            if code:
                raise Fault(f"the last part ended with {code}")
        compare(self.kind, self.straight, self.folder, self.steps)


def mounted(folder):
    """Makes a small file system there, where that is allowed."""
    folder.mkdir(parents=True)
    return subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", folder], stderr=subprocess.DEVNULL).returncode == 0


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--runs", type=int, default=300)
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--kinds", default="")
    parse.add_argument("--jobs", type=int, default=os.cpu_count())
    parse.add_argument("--only", type=int, help="repeats this run alone and prints its parts")
    parse.add_argument("--minutes", type=float, default=1e9, help="begins no run after so many")
    given = parse.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="stops-"))
    (work / "made").mkdir()
    prepare(work / "made")
    table, lock, begun = variants(work / "made"), threading.Lock(), time.monotonic()
    names = given.kinds.split(",") if given.kinds else list(table)
    straights, faults = {}, []
    count, stops, fine = collections.Counter(), collections.Counter(), collections.Counter()

    def straight_of(kind, variant):
        """The run that is not stopped, made once, its steps and the seconds of one."""
        with lock:
            entry = straights.setdefault((kind, variant), [threading.Lock(), None])
        with entry[0]:
            if not entry[1]:
                folder = work / f"{kind}-{variant}"
                part = Part((MPIRUN if kind == "ranks" else []) + [TRAIN, "train"] + table[kind][variant] + ["--out", str(folder)])
                if part.end():
                    print(f"{kind} {variant}:", *part.text, sep="\n", flush=True)
                    os._exit(1)
                seconds = [json.loads(line)["seconds"] for line in open(folder / "log.jsonl") if '"loss"' in line]
                entry[1] = (folder, saved_step(folder), sum(seconds) / len(seconds))
            return entry[1]

    def one(number):
        if (time.monotonic() - begun) / 60 > given.minutes:
            return
        draw = random.Random(given.seed * 1000003 + number)
        kind = names[number % len(names)]
        variant = number // len(names) % len(table[kind])
        straight, steps, seconds = straight_of(kind, variant)
        place = work / f"run-{number}"
        is_mount = kind == "full" and mounted(place)
        place.mkdir(exist_ok=True)
        run = Run(kind, number, table[kind][variant], straight, place / "run", draw, steps, seconds)
        try:
            run.go()
            fault = None
        except Exception as error:  # a run that went wrong must not end the others
            fault = f"{type(error).__name__}: {error}" if not isinstance(error, Fault) else str(error)
        with lock:
            count[kind] += 1
            stops[kind] += run.stops
            fine[kind] += fault is None
            if fault or given.only is not None:
                print(f"{number} {kind} {variant}: {fault or 'as it should be'}\n    " + "\n    ".join(run.story))
                if fault:
                    text = run.part.text if run.part else []
                    print("    " + shlex.join(run.part.command if run.part else []))
                    print("\n".join("    | " + line[:240] for line in text[-12:]), flush=True)
                    faults.append(number)
        if is_mount:
            subprocess.run(["umount", place], check=False)
        if not fault:
            shutil.rmtree(place, ignore_errors=True)

    try:
        numbers = [given.only] if given.only is not None else range(given.runs)
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(one, numbers))
    finally:
        if not faults:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{'kind':10} {'runs':>5} {'stops':>6} {'as they should be':>18}")
    for kind in names:
        print(f"{kind:10} {count[kind]:5} {stops[kind]:6} {fine[kind]:18}")
    print(f"{'all':10} {sum(count.values()):5} {sum(stops.values()):6} {sum(fine.values()):18}   "
          f"seed {given.seed}, {time.monotonic() - begun:.0f} s{', in ' + str(work) if faults else ''}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
