#!/bin/sh
# Every message has at most two lines: see test_messages.py.
command -v python3 >/dev/null || { printf '[  SKIPPED ] lengths of messages: NOT TESTED, because there is no python3\n0 passed, 0 failed, 1 skipped\n'; exit 0; }
exec python3 test/scripts/test_messages.py
