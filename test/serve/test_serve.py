"""sample --serve as its clients see it: answers are those of sample --prompts, whole and streamed, many at once; log-probabilities; texts
that end an answer; turns of a chat; tools by a scripted renderer; data/render.py. Then broken, slow, oversized and abandoned requests,
among which good ones go on; memory; the end. With the library openai, its client asks as well. Run by test_prepare.py's Python.
"""

import concurrent.futures
import http.client
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

from checks import TRAIN, WORK, check, close, train
import prepare_samples as samples

FOLDER = os.path.join(WORK, "model")
SIZE = "qwen3,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=512"
CONTEXT, NEW = 200, 12
RENDERER = r'''
import json, sys, time
dies = False
for line in sys.stdin:
    asked = json.loads(line)
    if "said" in asked and dies:
        sys.exit(4)
    dies = asked.get("row", {}).get("tools") == [{"type": "dies"}]
    if "said" in asked and len(asked["said"]) == 1:
        print(json.dumps({"message": {"role": "assistant", "content": "no calls"}}), flush=True)
    elif "said" in asked:
        assert asked["turn"] > 0 and len(asked["said"]) > 0
        time.sleep(0.2)
        print(json.dumps({"message": {"role": "assistant", "content": "two words", "raw": "x", "tool_calls": [{"type": "function", "id": "00010000",
              "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, "\u00e9"]}}}]}}), flush=True)
    elif asked["row"].get("tools") == [{"type": "hang"}]:
        sys.exit(3)
    elif asked["row"].get("tools") == [{"type": "wrong"}]:
        print(json.dumps({"error": "no such tool"}), flush=True)
    else:
        print(json.dumps({"keep": 0, "ids": [1 + len(json.dumps(asked["row"])) % 7, 2, 3]}), flush=True)
'''


class Server:
    def __init__(self, *more, program=TRAIN):
        words = [program, "sample", "--model", FOLDER, "--serve", "0", "--max-context", str(CONTEXT), "--max-new-tokens", str(NEW), "--slots", "4", *more]
        environment = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=4:max_free_fill_size=4096"}  # libevent is not sanitized
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=open(os.path.join(WORK, "serve.err"), "w"), text=True, env=environment)
        line = self.process.stdout.readline()
        check("the server says where it listens", "http://127.0.0.1:" in line, open(os.path.join(WORK, "serve.err")).read()[-400:])
        self.port = int(line.split("127.0.0.1:")[1].split("/")[0])

    def send(self, method, path, body=None, headers={}, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text

    def chat(self, messages, **more):
        """Returns the answer's object; of a refusal (status, message)."""
        status, text = self.send("POST", "/v1/chat/completions", json.dumps({"messages": messages, **more}))
        found = json.loads(text)
        return found if status == 200 else (status, found["error"]["message"])

    def stream(self, messages, **more):
        """Returns the chunks of a streamed answer."""
        status, text = self.send("POST", "/v1/chat/completions", json.dumps({"messages": messages, "stream": True, **more}))
        events = text.decode().split("\n\n")
        check("a stream ends", status == 200 and events[-2:] == ["data: [DONE]", ""], events[-3:])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def health(self):
        return json.loads(self.send("GET", "/health")[1])

    def memory(self):
        return sum(int(line.split()[1]) for line in open(f"/proc/{self.process.pid}/status") if line.startswith(("RssAnon", "VmSwap")))

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        errors = open(os.path.join(WORK, "serve.err")).read()
        check("it ends as it was asked to, and loses no memory", code == 128 + number and "Sanitizer" not in errors and "runtime error" not in errors,
              f"exit {code}: {errors[-1500:]}")


def user(text):
    return [{"role": "user", "content": text}]


def prompts(messages, *more):
    """Returns the answers of sample --prompts to chats."""
    path = os.path.join(WORK, "prompts.jsonl")
    samples.write_lines(path, [{"messages": one} for one in messages])
    lines = train("sample", "--model", FOLDER, "--prompts", path, "--max-new-tokens", NEW, "--slots", 1, "--quiet", *more).splitlines()
    return [json.loads(line) for line in lines]


def content(found):
    return found["choices"][0]["message"]["content"] if isinstance(found, dict) else found


samples.tokenizer_folder(os.path.join(WORK, "tokenizer"), samples.byte_level(), samples.CHATML, bos="<s>", eos="<|im_end|>")
train("convert", "--init", SIZE, "--out", FOLDER)
for name in os.listdir(os.path.join(WORK, "tokenizer")):
    os.link(os.path.join(WORK, "tokenizer", name), os.path.join(FOLDER, name))
subprocess.run([sys.executable, "data/tokenizer_file.py", "--tokenizer", FOLDER, "--out", os.path.join(FOLDER, "tokenizer.tok")], check=True,
               capture_output=True)
rng = random.Random(1)
chats = [user(" ".join(rng.choices(samples.PHRASES, k=rng.randrange(1, 5))).strip() or "a") for _ in range(50)]

# ---- options ------------------------------------------------------------------------------------------------------------------
samples.write_text(os.path.join(WORK, "short"), "short\n")
TAKEN = socket.create_server(("127.0.0.1", 0))
for code, what, *words in (
        (2, "other machines may reach", "--serve", "0.0.0.0:0"), (2, "must be a port", "--serve", "port"), (2, "must be a port", "--serve", ":80"),
        (2, "must be a port", "--serve", "65536"), (2, "as [ADDRESS]:PORT", "--serve", "::1"), (2, "exclude each other", "--serve", "0", "--prompt", "a"), (2, "leave --chat", "--serve", "0", "--chat"),
        (2, "has no meaning without --serve", "--prompt", "a", "--serve-token", "x"), (2, "at least 32 letters", "--serve", "0", "--serve-token", WORK + "/short"),
        (2, "has no meaning without --serve", "--prompt", "a", "--render-command", "x"), (1, "cannot listen", "--serve", f"127.0.0.1:{TAKEN.getsockname()[1]}"),
        (2, "needs the model's tokenizer file", "--serve", "0", "--tokenizer", "none")):
    run = subprocess.run([TRAIN, "sample", "--model", FOLDER, *words], capture_output=True, text=True,
                         env={**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"})
    lines = [line for line in run.stderr.splitlines() if line.startswith("train: ")]
    check(f"{words} is refused", run.returncode == code and len(lines) == 1 and what in lines[0], (run.returncode, run.stderr[-300:]))

# ---- answers ------------------------------------------------------------------------------------------------------------------
server = Server("--render-command", f"exec '{sys.executable}' data/render.py - '{FOLDER}'")
wanted = prompts(chats, "--temperature", 0)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda chat: server.chat(chat, temperature=0, return_token_ids=True), chats))
    check("50 chats, 8 at once, are those of --prompts", [content(one) for one in found] == [one["text"] for one in wanted])
    check("and their ids", [one["choices"][0]["token_ids"] for one in found] == [one["ids"] for one in wanted])
    check("and their prompts'", [one["prompt_token_ids"] for one in found] == [one["prompt_ids"] for one in wanted])
    check("tokens are counted", all(one["usage"] == {"prompt_tokens": len(w["prompt_ids"]), "completion_tokens": len(w["ids"]),
                                                     "total_tokens": len(w["prompt_ids"]) + len(w["ids"]), "prompt_tokens_details":
                                                     one["usage"]["prompt_tokens_details"]} for one, w in zip(found, wanted)))
    check("why they end", all(one["choices"][0]["finish_reason"] == {"eos": "stop"}.get(w["stop"], w["stop"]) for one, w in zip(found, wanted)))
    streams = list(pool.map(lambda chat: server.stream(chat, temperature=0, return_token_ids=True, stream_options={"include_usage": True}), chats[:16]))
    for chunks, whole in zip(streams, found):
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        check("a stream's parts are the whole", "".join(d["delta"].get("content", "") for d in deltas) == content(whole) and
              sum((d["token_ids"] for d in deltas), []) == whole["choices"][0]["token_ids"] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"] and
              deltas[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] and deltas[0]["delta"]["role"] == "assistant", chunks)
for seed in (3, 4):
    drawn = prompts(chats[:1], "--seed", seed, "--temperature", 0.8, "--top-p", 0.9, "--top-k", 50)[0]["text"]
    check("a seed's answer", content(server.chat(chats[0], seed=seed, temperature=0.8, top_p=0.9, top_k=50)) == drawn)
fresh = [server.chat(user("never asked before")[:1], max_tokens=1)["usage"] for _ in range(2)]
check("tokens that did not run, of an answer of one token", fresh[0]["prompt_tokens_details"]["cached_tokens"] < fresh[0]["prompt_tokens"] - 4 and
      fresh[1]["prompt_tokens_details"]["cached_tokens"] == fresh[0]["prompt_tokens"] - 1, fresh)
check("max_tokens", server.chat(chats[0], max_tokens=2)["usage"]["completion_tokens"] == 2)

scored = server.chat(chats[1], temperature=0, logprobs=True, top_logprobs=5, return_token_ids=True)["choices"][0]
for token in scored["logprobs"]["content"]:
    top = [one["logprob"] for one in token["top_logprobs"]]
    check("the greedy token is the likeliest", top == sorted(top, reverse=True) and len(top) == 5 and token["logprob"] == top[0] and
          sum(map(math.exp, top)) < 1 and bytes(token["bytes"]).decode(errors="replace") == token["token"], token)
check("each token has a log-probability", len(scored["logprobs"]["content"]) == len(scored["token_ids"]))
chunks = server.stream(chats[1], temperature=0, logprobs=True, top_logprobs=5)
check("so in a stream", sum((c["choices"][0]["logprobs"]["content"] for c in chunks), []) == scored["logprobs"]["content"])

text = wanted[2]["text"]
for stop in (text[3:5], text[:1], "never there"):
    cut = text[:text.index(stop)] if stop in text else text
    one, parts = server.chat(chats[2], temperature=0, stop=["zzz", stop]), server.stream(chats[2], temperature=0, stop=stop)
    check("a stop text", content(one) == cut == "".join(c["choices"][0]["delta"].get("content", "") for c in parts), (stop, cut, one))

turns = [{"role": "system", "content": "Be kind"}, *chats[3], {"role": "assistant", "content": "Hello."}, *chats[4]]
check("later turns", content(server.chat(turns, temperature=0)) == prompts([turns], "--temperature", 0)[0]["text"])
system, reused = [{"role": "system", "content": "Be kind and brief, and answer in one word."}], []
for number in (7, 8, 7, 8, 7, 8):  # two chats by turns, which share a system message
    chat = system + sum(([*user(f"chat {number}, a question {turn}"), {"role": "assistant", "content": "Yes."}] for turn in range(len(reused) // 2 + 1)), [])[:-1]
    found = server.chat(chat, temperature=0, max_tokens=3)
    reused.append((found["usage"]["prompt_tokens"], found["usage"]["prompt_tokens_details"]["cached_tokens"]))
    check("turns by turns", content(found) == prompts([chat], "--temperature", 0, "--max-new-tokens", 3)[0]["text"])
check("a turn reads what is new alone", all(cached >= before - 1 for (before, _), (_, cached) in zip(reused, reused[2:])), reused)
listed = [{"role": "user", "content": [{"type": "text", "text": part} for part in (chats[3][0]["content"], " b")]}]
check("content in parts", content(server.chat(listed, temperature=0)) == prompts([user(chats[3][0]["content"] + " b")], "--temperature", 0)[0]["text"])
tool = [*chats[3], {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "content": "7", "tool_call_id": "1"}]
found = server.chat(tool, temperature=0, return_token_ids=True)
check("a chat with a tool's answer is rendered", isinstance(found, dict) and found["usage"]["prompt_tokens"] > 20, found)

# ---- faults -------------------------------------------------------------------------------------------------------------------
for what, status, more in (
        ("n must be 1", 400, {"n": 2}), ("is not known here", 400, {"min_p": 0.1}), ("temperature must be a number", 400, {"temperature": -1}),
        ("penalty must be 0", 400, {"presence_penalty": 1}), ("stop must be", 400, {"stop": [""]}), ("stop must be", 400, {"stop": list("abcde")}),
        ("logit_bias must be", 400, {"logit_bias": {"1": 5}}), ("response_format must be", 400, {"response_format": {"type": "json_object"}}),
        ("top_logprobs needs", 400, {"top_logprobs": 3}), ("max_tokens must be a whole number", 400, {"max_tokens": 1.5}),
        ("tool_choice must be", 400, {"tool_choice": "required"}), ("parallel_tool_calls must be", 400, {"parallel_tool_calls": False}),
        ("enable_thinking must be", 400, {"chat_template_kwargs": {"enable_thinking": 0}}), ("stream_options must be", 400, {"stream_options": 5}),
        ("is not known here", 400, {"verbosity": "low"}), ("tools must be a list", 400, {"tools": "x"}),
        ("logit_bias must be", 400, {"logit_bias": 5}), ("response_format must be", 400, {"response_format": "json_object"}),
        ("65536 JSON values", 400, {"metadata": [0] * 70000})):
    found = server.chat(chats[0], **more)
    check(f"refused: {what}", found[0] == status and what in found[1], found)
for what, messages in (("at least one message", []), ("at least one message", "x"), ("object with a role", [1]), ("object with a role", [{}]),
                       ("content that is no text", [{"role": "user", "content": [{"type": "image_url"}]}]), ("at most 200", user("word " * 400))):
    found = server.chat(messages)
    check(f"refused: {what}", found[0] == 400 and what in found[1], found)
for status, method, path, body, headers in (
        (404, "GET", "/", None, {}), (404, "POST", "/v1/models", "{}", {}), (415, "POST", "/v1/chat/completions", "{}", {"Content-Type": "text/plain"}),
        (403, "GET", "/health", None, {"Host": "evil.example"}), (403, "GET", "/health", None, {"Host": "localhost.evil.example"}),
        (200, "GET", "/health", None, {"Host": f"localhost:{server.port}"}), (200, "GET", "/v1/models", None, {"Host": "127.0.0.1"}),
        (400, "POST", "/v1/chat/completions", "{", {}), (400, "POST", "/v1/chat/completions", '{"a": 1, "a": 2}', {}),
        (400, "POST", "/v1/chat/completions", "", {}), (400, "POST", "/v1/chat/completions", b'{"messages": "\xff"}', {}),
        (400, "POST", "/v1/chat/completions", "[" * 5000, {}), (413, "POST", "/v1/chat/completions", b" " * (4 << 20), {})):
    try:
        found = server.send(method, path, body, headers)[0]
    except OSError:  # an oversized request may find its connection closed
        found = 413
    check(f"{method} {path} {headers}: {status}", found == status, found)
body = json.dumps({"messages": chats[0], "stream": True}).encode()
with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
    connection.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)
    found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
check("a stream of HTTP/1.0 ends with its connection", b"Content-Length" not in found and found.endswith(b"data: [DONE]\n\n"), found)
status = server.send("OPTIONS", "/v1/chat/completions", None, {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"})[0]
check("no other origin is allowed", status >= 400, status)

# ---- a thousand bad requests, among which good ones go on ---------------------------------------------------------------------
GOOD = json.dumps({"messages": chats[0], "temperature": 0, "max_tokens": 4}).encode()


def raw(bytes_, wait=0.0):
    """Sends bytes, and leaves at once or after a time."""
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(bytes_)
            if wait:
                connection.settimeout(wait)
                connection.recv(1000)
    except OSError:
        pass


def head(length, *more):
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}", *more, "", ""]).encode()


def bad(number):
    """Sends a bad request: changed JSON, changed HTTP, more or less than was announced, or a client that leaves."""
    draw = random.Random(number)
    body = bytearray(GOOD if draw.random() < 0.5 else json.dumps({"messages": chats[0], "stream": True, "tools": [{}], "max_tokens": 100}).encode())
    kind = number % 8
    for _ in range(draw.randrange(1, 6)) if kind < 3 else ():
        body[draw.randrange(len(body))] = draw.randrange(256)
    whole = bytearray(head(len(body)) + body)
    if kind < 3:
        raw(bytes(whole), 5)
    elif kind == 3:
        for _ in range(draw.randrange(1, 20)):
            whole[draw.randrange(len(whole))] = draw.randrange(256)
        raw(bytes(whole), 0.2)
    elif kind == 4:
        raw(head(draw.choice([-1, 0, 5, 10**7, 10**18, "a"])) + bytes(body), 0.2)
    elif kind == 5:
        raw(b"GET /" + b"a" * draw.randrange(10, 40000) + b" HTTP/1.1\r\nX: " + b"b" * draw.randrange(20000) + b"\r\n\r\n", 0.2)
    elif kind == 6:
        raw(bytes(whole[:draw.randrange(len(whole))]))
    else:
        raw(head(len(GOOD), "Transfer-Encoding: chunked") + b"%x\r\n" % draw.choice([5, 10**9]) + bytes(body), 0.2)


slow = []
for _ in range(40):  # they send a part of a request, and then nothing
    slow.append(socket.create_connection(("127.0.0.1", server.port)))
    slow[-1].sendall(head(1000) + b"{")
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    before = None
    for first in range(0, 1000, 200):
        list(pool.map(bad, range(first, first + 200)))
        started = time.time()
        check("a good request goes on", content(server.chat(chats[0], temperature=0)) == wanted[0]["text"])
        check("within 20 s", time.time() - started < 20, time.time() - started)
        before = before or server.memory()
grown = server.memory() - before
check("memory does not grow with bad requests", grown < 48 << 10, f"{grown} KiB")
for connection in slow:
    connection.close()
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    written = pool.submit(server.stream, chats[0], max_tokens=150)
    while not written.done():  # clients that come and leave between two tokens
        raw(b"")
    check("a stream goes on while others leave", written.result()[-1]["choices"][0]["finish_reason"] in ("length", "stop"))
chunks = socket.create_connection(("127.0.0.1", server.port))
body = json.dumps({"messages": chats[0], "stream": True, "max_tokens": 150, "temperature": 1}).encode()
chunks.sendall(head(len(body)) + body)
chunks.recv(10)
chunks.close()
for _ in range(100):
    idle = server.health()
    if not idle["writing"] and not idle["waiting"]:
        break
    time.sleep(0.1)
check("a client that leaves frees its slot", not idle["writing"] and not idle["waiting"], idle)

try:
    import openai
except ImportError:
    openai = None
if openai:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda chat: client.chat.completions.create(model="x", messages=chat, temperature=0), chats))
        check("openai: 50 chats, 8 at once", [one.choices[0].message.content for one in found] == [one["text"] for one in wanted])
        found = list(pool.map(lambda chat: "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(
            model="x", messages=chat, temperature=0, stream=True)), chats))
        check("openai: streamed", found == [one["text"] for one in wanted])
    check("openai: models", [one.id for one in client.models.list()] == ["model"])

# ---- the end: what was asked before it is answered -----------------------------------------------------------------------------
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    late = [pool.submit(server.chat, chat, temperature=0, max_tokens=NEW) for chat in chats[:8]]
    while server.health()["writing"] < 4 and not all(one.done() for one in late):
        pass
    server.end()
    check("the end waits for answers", [content(one.result()) for one in late] == [one["text"] for one in wanted[:8]])

# ---- the renderer next to the program ------------------------------------------------------------------------------------------
shutil.copy(TRAIN, os.path.join(WORK, "train"))
os.symlink(os.path.abspath("data"), os.path.join(WORK, "data"))
os.environ["STREAMBP_PYTHON"] = sys.executable
server = Server(program=os.path.join(WORK, "train"))
found = server.chat(tool, temperature=0)
check("data/render.py is found, and the model's tokenizer", isinstance(found, dict) and found["usage"]["prompt_tokens"] > 20, found)
server.end()

# ---- tools by a scripted renderer; a token -------------------------------------------------------------------------------------
samples.write_text(os.path.join(WORK, "renderer.py"), RENDERER)
samples.write_text(os.path.join(WORK, "token"), "0123456789abcdef0123456789abcdef\n")
server = Server("--render-command", f"exec '{sys.executable}' '{WORK}/renderer.py'", "--serve-token", os.path.join(WORK, "token"))
check("without the token", server.send("GET", "/health")[0] == 401)
check("with another one", server.send("GET", "/health", None, {"Authorization": "Bearer 0123456789abcdef0123456789abcdee"})[0] == 401)
bearer = {"Authorization": "Bearer 0123456789abcdef0123456789abcdef"}
check("with the token", server.send("GET", "/health", None, bearer)[0] == 200)
ask = lambda **more: server.send("POST", "/v1/chat/completions", json.dumps({"messages": chats[0], **more}), bearer)
CALL = {"name": "add", "arguments": '{"a":1,"b":[2.5,"\u00e9"]}'}
found = json.loads(ask(tools=[{"type": "function"}])[1])["choices"][0]
check("calls", found["finish_reason"] == "tool_calls" and found["message"]["tool_calls"][0]["function"] == CALL and found["message"]["content"] == "two words", found)
for stop, wants in (" words", "two"), ("two", None):
    found = json.loads(ask(tools=[{"type": "function"}], stop=["never", stop])[1])["choices"][0]["message"]
    check("a stop text before calls", found["content"] == wants and found["tool_calls"][0]["function"] == CALL, found)
events = [json.loads(e[6:]) for e in ask(tools=[{"type": "function"}], stream=True)[1].decode().split("\n\n") if e[:7] == "data: {"]
check("calls in a stream", events[-1]["choices"][0]["finish_reason"] == "tool_calls" and
      events[-1]["choices"][0]["delta"]["tool_calls"][0]["function"] == CALL and not any("content" in e["choices"][0]["delta"] for e in events[:-1]), events)
answer = lambda **more: json.loads(ask(temperature=0, return_token_ids=True, **more)[1])["choices"][0]
found = answer(tools=[{"type": "function"}], max_tokens=1)
check("a text without calls is its own content", found["message"]["content"] != "no calls" and found["finish_reason"] == "length", found)
alone = answer(tools=[{"type": "function"}])["token_ids"]
with concurrent.futures.ThreadPoolExecutor(9) as pool:  # others take its slot while the renderer reads it
    found = pool.submit(answer, tools=[{"type": "function"}])
    others = [pool.submit(ask, max_tokens=12, temperature=1) for _ in range(8)]
    check("calls keep the ids of their text", found.result()["token_ids"] == alone and all(one.result()[0] == 200 for one in others), alone)
status, text = ask(tools=[{"type": "wrong"}])
check("a chat that cannot be rendered", status == 400 and b"no such tool" in text, text)
status, text = ask(tools=[{"type": "hang"}])
check("a renderer that dies", status == 500 and b"exit code 3" in text, text)
status, text = ask(tools=[{"type": "dies"}])
check("a renderer that dies on the answer", status == 500 and b"exit code 4" in text, text)
try:
    status, text = ask(tools=[{"type": "dies"}], stream=True)
except (OSError, http.client.HTTPException):
    text = b""
check("and in a stream, which does not end", b"[DONE]" not in text, text)
check("is started again", ask(tools=[{"type": "function"}])[0] == 200)
server.end(signal.SIGINT)

# ---- without a renderer --------------------------------------------------------------------------------------------------------
server = Server("--render-command", "none")
for more in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"x": 1}}, {"tools": [{}]}):
    found = server.chat(chats[0], **more)
    check(f"refused without a renderer: {more}", found[0] == 400 and "need data/render.py" in found[1], found)
check("a plain chat is answered", content(server.chat(chats[0], temperature=0)) == wanted[0]["text"])
server.end()
close()
