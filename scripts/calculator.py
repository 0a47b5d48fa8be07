#!/usr/bin/env python3
"""An example environment for train --environment-command: a calculator with files. A task has a column `files`, their texts by name, and
an `answer`. The model calls tools, in its own form of tool calls or as lines of text:

    read NAME           the text of a file
    write NAME TEXT     makes a file
    calc EXPRESSION     the value of + - * / and parentheses
    answer TEXT         ends the task: reward 1 if it is right

A failed call costs 0.05. State follows from the conversation, so any process can answer any turn.
"""

import ast
import json
import operator
import sys

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.USub: operator.neg}
PARAMETERS = {"read": ["name"], "write": ["name", "text"], "calc": ["expression"], "answer": ["text"]}


def value(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and abs(node.value) < 1e15:
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("not an expression")


def calls_of(message):
    """Returns [(id, name, arguments)] of a turn: its tool calls, else its lines."""
    if message.get("tool_calls"):
        return [(call.get("id"), call["function"]["name"], [str(call["function"]["arguments"].get(name, "")) for name in
                 PARAMETERS.get(call["function"]["name"], [])]) for call in message["tool_calls"]]
    words = [line.split(maxsplit=1) for line in message["content"].splitlines() if line.strip()]
    return [(None, word[0], word[1].split(maxsplit=max(len(PARAMETERS.get(word[0], [])) - 1, 0)) if word[1:] else []) for word in words]


def do(files, name, arguments):
    """Returns what a tool says; raises an error for a failed call."""
    if len(arguments) != len(PARAMETERS[name]):
        raise ValueError("wrong arguments")
    if name == "write":
        files[arguments[0]] = arguments[1]
    return {"read": lambda: files[arguments[0]], "write": lambda: "done", "answer": lambda: "",
            "calc": lambda: f"{value(ast.parse(arguments[0].strip(), mode='eval').body):.10g}"}[name]()


def turn(asked):
    files, plain = dict(asked["row"].get("files", {})), "messages" not in asked["row"]
    for message in (message for message in asked["messages"] if "raw" in message):  # the last turn is the new one
        added, errors, done, reward = [], 0, False, 0.0
        for number, name, arguments in calls_of(message) or [(None, "nothing", [])]:
            try:
                said = do(files, name, arguments)
            except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError, RecursionError) as error:
                said, errors = f"error: {type(error).__name__}", errors + 1
            if name == "answer" and not errors:
                done, reward = True, float(arguments[0].strip() == str(asked["row"].get("answer")).strip())
            added.append({"role": "tool", "content": said + "\n" * plain, **({"tool_call_id": number} if number else {})})
    return {"messages": added, "reward": reward - 0.05 * errors, "done": done, "error": errors > 0}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(turn(json.loads(line))), flush=True)
