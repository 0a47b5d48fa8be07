"""The command `streambp` of the wheel: executes the program, or prepare.py for `streambp prepare`.

Nothing of Python stays: exec keeps the process, its terminal and its signals. NVIDIA's libraries in site-packages are searched
after the folders of STREAMBP_LIBRARIES.
"""

import importlib.util
import os
import shutil
import signal
import sys

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def main():
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; exec would pass that on
        signal.signal(ignored, signal.SIG_DFL)
    command, arguments = sys.argv[0], sys.argv[1:]
    if os.path.basename(command) == "__main__.py" or shutil.which("streambp") == command:
        command = "streambp"
    os.environ["STREAMBP_PREPARE"] = f"{command} prepare"
    os.environ["STREAMBP_PYTHON"] = sys.executable  # renders the turns of agents
    if arguments[:1] == ["prepare"]:
        return execute(sys.executable, [sys.executable, os.path.join(PACKAGE, "data", "prepare.py"), *arguments[1:]])
    nvidia = importlib.util.find_spec("nvidia")
    folders = [os.environ.get("STREAMBP_LIBRARIES"), *(nvidia and nvidia.submodule_search_locations or ())]
    os.environ["STREAMBP_LIBRARIES"] = ":".join(filter(None, folders))
    return execute(os.path.join(PACKAGE, "streambp"), [command, *arguments])


def execute(program, words):
    try:
        os.execv(program, words)
    except OSError as error:
        sys.exit(f"streambp: {program}: {error.strerror}; reinstall the wheel: pip install --force-reinstall ./streambp_c-*.whl")


if __name__ == "__main__":
    main()
