"""Data sets of Hugging Face's hub: hf://datasets/OWNER/NAME[@REVISION][/FOLDER, /FILE or /SPLIT]. Needs huggingface_hub.

They are downloaded into Hugging Face's cache: a folder or file alone; of a data set or split all files that inputs.py reads.
"""

import importlib
import os
import re

import inputs

NAME = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")
KNOWN = [f"*.{suffix}{packed}" for suffix in inputs.READERS for packed in ("", *(f".{each}" for each in inputs.PACKED))]  # of files


def download(path, name, revision, patterns):
    """Returns the folder of the data set's snapshot, which has the files that match a pattern."""
    try:
        library = importlib.import_module("huggingface_hub")
        return library.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns)
    except ImportError:
        raise inputs.InputFailure(f"{path}: data sets of the hub need huggingface_hub: pip install huggingface_hub") from None
    except Exception as error:  # the library has a class for each fault of network, rights and names
        why = " ".join(str(error).split())[:60]
        raise inputs.InputFailure(f"{path}: {type(error).__name__}: {why}; check name and network; a gated set needs: hf auth login") from None


def fetch(path):
    """Returns the local folder or file of a data set, and the split that the name ends with, or None."""
    found = NAME.fullmatch(path.rstrip("/"))
    if not found:
        raise inputs.InputFailure(f"{path}: names no data set; give hf://datasets/OWNER/NAME, maybe with /FOLDER, /FILE or /SPLIT")
    name, revision, rest = found.groups()
    part = os.path.join(download(path, name, revision, [rest, f"{rest}/*"]), rest) if rest else ""
    if os.path.exists(part):
        return part, None
    if rest and re.search(r"[/.]", rest):
        raise inputs.InputFailure(f"{path}: {name} has no file or folder {rest}; see huggingface.co/datasets/{name}/tree/main")
    return download(path, name, revision, KNOWN), rest
