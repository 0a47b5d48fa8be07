"""Cuts long reasoning into rounds (InftyThink, arXiv 2503.06692): each round is a sample that fits a short context.

    round 1      question                                  -> segment 1, <summary> s1 </summary>
    round i      question <history> s(i-1) </history>      -> segment i, <summary> si </summary>
    last round   question <history> s(n-1) </history>      -> segment n, answer

scripts/recipes/inftythink.py reads and writes the same marks in its rounds. Summaries come from the row (`summaries`) or from
a command. The command gets a line of JSON with question, history (the previous summary, or null) and segment,
and answers with a line of JSON, a text.
"""

import bisect
import contextlib
import json
import os
import re
import select
import subprocess
import threading

import records
import templates
from records import Rejected

HISTORY, SUMMARY = "\n\n<history>\n{}\n</history>", "<summary>\n{}\n</summary>"
MOST = 1 << 20  # bytes of an answer, its newline included
BREAK = re.compile(r"\n+|(?<=[.!?])[ \t]+|(?<=[\u3002\uff01\uff1f])")  # a segment may end after this match


class SummaryFailure(Exception):
    """The command that summarises failed: the run must end."""


def cut(trace, most, tokens_before):
    """Returns segments of at most `most` tokens that give `trace` together. They end after a line or a sentence, if there is one.
    tokens_before(at): tokens that begin before the character `at`."""
    breaks = [found.end() for found in BREAK.finditer(trace)]
    segments, begin = [], 0
    while begin < len(trace):
        first, chars = tokens_before(begin), range(begin + 1, len(trace) + 1)
        end = begin + max(bisect.bisect_right(chars, first + most, key=tokens_before), 1)
        if end < len(trace):
            last = bisect.bisect_right(breaks, end) - 1
            end = breaks[last] if last >= 0 and breaks[last] > begin else end
        segments.append(trace[begin:end])
        begin = end
    return segments


class Summaries:
    """A command that summarises, started once in each process, in a process group of its own. As for a reward command, time and size of its
    answers are limited, and a guard kills the group a second after this process has ended."""

    def __init__(self, command, timeout):
        self.command, self.timeout, self.process = command, timeout, None

    def __call__(self, question, segments):
        """Returns the summaries after each segment except the last."""
        found = [None]
        for segment in segments[:-1]:
            found.append(self.ask({"question": question, "history": found[-1], "segment": segment.strip()}))
        return found[1:]

    def ask(self, question):
        if not self.process:
            own = {"stdin": subprocess.PIPE, "start_new_session": True}
            self.process = subprocess.Popen(self.command, shell=True, stdout=subprocess.PIPE, **own)
            self.guard = subprocess.Popen(["sh", "-c", 'exec >&- 2>&-; read -r _; sleep 1; kill -9 -"$0"', str(self.process.pid)], **own)
        answer, text, late, pipe = b"", None, [], self.process.stdout.fileno()
        timer = threading.Timer(self.timeout, lambda: (late.append(True), os.killpg(self.process.pid, 9)))
        timer.daemon = True
        timer.start()
        early = select.select([pipe], [], [], 0)[0]  # the command answers without a line, or has ended
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), json.dumps(question).encode() + b"\n")
        while b"\n" not in answer and len(answer) <= MOST and (part := os.read(pipe, 1 << 16)):
            answer += part
        status = None if b"\n" in answer or len(answer) > MOST else self.process.wait()
        timer.cancel()
        line, _, more = answer.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            text = json.loads(line)
        for wrong, why in ((late, f"gave no answer within {self.timeout:g} s; --summary-timeout allows more"),
                           (status is not None, f"ended with status {status}; try it by hand on a line of JSON"),
                           (len(answer) > MOST, f"answered with more than {MOST:,} bytes: {answer[:40]!r}"),
                           (early or more, f"gave more answers than lines: {(more or line)[:40]!r}"),
                           (not isinstance(text, str) or not text.strip(), f"answered {line[:40]!r}, not a text as JSON")):
            if wrong:
                raise SummaryFailure(f"--summary-command {why}")
        return text.strip()


def reasoning(message):
    """Returns (reasoning, the key of a message that holds it or None, answer); no reasoning: None."""
    key = next((key for key in templates.REASONING if message.get(key)), None)
    if key:
        return message[key], key, message["content"]
    thought, closed, answer = message["content"].partition("</think>")
    if not thought.lstrip().startswith("<think>"):
        return None, None, answer
    if not closed:
        raise Rejected(records.CUT_OFF, "--iterative needs the answer after the reasoning")
    return thought.lstrip().removeprefix("<think>").strip("\n"), None, answer.lstrip("\n")


def rounds(source, row, most, encoding, summaries):
    """Returns the records.Source of each round of a conversation's last turn. row: its `segments` and `summaries`, or None. Turns before
    the last do not count, because they occur in every round."""
    if source.prompt is None or not isinstance(source.body, list):
        raise Rejected(records.WRONG_TYPE, "--iterative cuts the reasoning of messages, and this is a text")
    *before, last = source.prompt + source.body
    trace, field, answer = reasoning(last) if last["role"] == "assistant" else (None, None, None)
    segments, given = (part and records.want(part, list, key) for part, key in zip(row, ("segments", "summaries")))
    if trace is None:
        raise Rejected(records.WRONG_TYPE, "--iterative needs a last turn of the assistant with reasoning (data/README.md)")
    if not segments:
        encoded = encoding(trace)
        segments = cut(trace, most, lambda at: encoded.behind(at)[0])
    elif not all(isinstance(part, str) for part in segments) or "".join("".join(segments).split()) != "".join(trace.split()):
        raise Rejected(records.WRONG_TYPE, "segments are not the parts of the reasoning")
    if len(segments) == 1:
        return [records.Source([last], before)]
    if not before or before[-1]["role"] != "user":
        raise Rejected(records.WRONG_TYPE, "--iterative cuts the answer to a user's turn, and this one follows another")
    if not given and not summaries:
        raise Rejected(records.WRONG_TYPE, f"has no summaries of its {len(segments)} segments; add a column, or give --summary-command")
    found = summaries(before[-1]["content"], segments) if not given else given
    if len(found) != len(segments) - 1 or not all(isinstance(text, str) and text.strip() for text in found):
        raise Rejected(records.WRONG_TYPE, f"has {len(found)} summaries; {len(segments)} segments need {len(segments) - 1}, all texts")

    result = []
    for i, segment in enumerate(segments):
        ask = before[-1] if i == 0 else {**before[-1], "content": before[-1]["content"] + HISTORY.format(found[i - 1].strip())}
        say = answer if i + 1 == len(segments) else SUMMARY.format(found[i].strip())
        turn = {field: segment.strip(), "content": say} if field else {"content": f"<think>\n{segment.strip()}\n</think>\n\n{say}"}
        result.append(records.Source([{**last, **turn}], [*before[:-1], ask]))
    return result
