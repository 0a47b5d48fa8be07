"""Makes the texts of passkey_demo.sh, whose tokens are bytes: random words, among them "the key is <482>" at some depth, and at the end the
question "what is the key? <". The answer is "482".

    passkey_demo.py data FOLDER LENGTH COUNT    a shard of texts with their answers, key-00000.bin; only the answer counts
    passkey_demo.py text LENGTH DEPTH SEED      one text; DEPTH of the key: 0 (beginning) to 1 (end)
    passkey_demo.py key SEED                    its answer

Only `data` needs numpy.
"""

import random
import sys

WORDS = "grass sky sun sea road wood bird stone rain wind hill lake moon sand leaf fog and or is was in on by of a the".split()
QUESTION = " what is the key? <"


def key_of(draw):
    """Returns three different digits, so that each digit tells which digit follows."""
    return "".join(draw.sample("0123456789", 3))


def filler(draw, length):
    text = ""
    while len(text) < length:
        text += draw.choice(WORDS) + (". " if draw.random() < 0.15 else " ")
    return text[:length]


def text_of(draw, length, depth):
    """Returns a text and its answer, `length` bytes together. The key's random numbers are drawn first, so `key` needs no text."""
    key = key_of(draw)
    needle = " the key is <" + key + "> "
    room = length - len(needle) - len(QUESTION) - len(key)
    before = round(depth * room)
    return filler(draw, before) + needle + filler(draw, room - before) + QUESTION, key


def lesson_of(draw, longest):
    """Makes a text of up to `longest` bytes, more often a short text: the key, the question, its answer, and often "<482>" again. Returns it
    and the counts of its bytes."""
    length = int(48 * (longest / 48) ** draw.random())
    text, key = text_of(draw, draw.randint(48, length), draw.random())
    counts = [0] * len(text) + [1] * len(key)
    text += key
    while True:
        most = length - len(text) if draw.random() < 0.1 else 12
        between = "> " + filler(draw, int(draw.random() * most)) + "<"
        if len(text) + len(between) + len(key) > length:
            return text, counts
        text += between + key
        counts += [0] * len(between) + [1] * len(key)


def data(folder, length, count):
    from byte_shard import write_shard

    draw = random.Random(length)
    write_shard(folder, "key", (lesson_of(draw, length) for _ in range(count)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["data"] and len(sys.argv) == 5:
        data(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["text"] and len(sys.argv) == 5:
        sys.stdout.write(text_of(random.Random(int(sys.argv[4])), int(sys.argv[2]), float(sys.argv[3]))[0])
    elif sys.argv[1:2] == ["key"] and len(sys.argv) == 3:
        print(key_of(random.Random(int(sys.argv[2]))))
    else:
        raise SystemExit(__doc__)
