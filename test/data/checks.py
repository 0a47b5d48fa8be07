"""Checks that are counted: check(what, ok), and at the end close(), which prints `N passed, N failed, N skipped`."""
passed = failed = 0


def check(what, ok, why=""):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"FAILED: {what}{': ' if why else ''}{why}")


def close():
    print(f"{passed} passed, {failed} failed, 0 skipped")
    raise SystemExit(failed > 0)
