"""Loads a tokenizer.json with the tokens that transformers adds to it at loading (5.24): tokens of tokenizer_config.json
(added_tokens_decoder, extra_special_tokens, additional_special_tokens, eos_token and other names), else of special_tokens_map.json and
added_tokens.json. Added tokens get the next free ids, in the order of the ids that the files declare; a declared id itself does not count.

    load(path)                 -> (bytes of tokenizer.json, its tokenizers.Tokenizer with these tokens, ids of the file without them)
"""

import os

from tokenizers import AddedToken, Tokenizer

import templates

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def token_of(value, **more):
    """Returns an AddedToken for an object of a file, a text unchanged, and None for other values."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        value = AddedToken(value["content"], **{**{flag: value[flag] for flag in FLAGS if isinstance(value.get(flag), bool)}, **more})
    return value if isinstance(value, (str, AddedToken)) and str(value) else None


def find(folder, tokenizer):
    """Returns [AddedToken] in the order in which transformers adds them; a text may come twice, with other flags."""
    text_of = lambda token: token if isinstance(token, str) else token.content
    read = lambda name: templates.read_json(os.path.join(folder, name))
    config, own = read("tokenizer_config.json"), tokenizer.get_added_tokens_decoder()
    declared, slots = config.get("added_tokens_decoder"), ("extra_special_tokens", "additional_special_tokens")
    more = read("special_tokens_map.json") if declared is None else {}
    extra, late = (config.get(slot) for slot in slots)
    extra, late = (extra, late) if extra else (late, None)
    config |= {key: token_of(value, special=True) for key, value in more.items()}
    own_names = {key: value for key, value in config.items() if key.endswith("_token") and key not in templates.SPECIAL_TOKENS}
    if isinstance(extra, dict):
        own_names, extra = own_names | extra, None
    if isinstance(more.get(slots[0]), list):
        extra = [*(extra or []), *more[slots[0]]]
    late = [] if extra else more.get(slots[1]) or late or []
    extra, late = ([token for token in tokens if token_of(token)] for tokens in (extra or [], late))
    named = [config.get(name) for name in templates.SPECIAL_TOKENS]
    known = {int(i): token_of(token) for i, token in (declared or {}).items()}
    if declared is None:
        special = {text_of(token) for token in [*named, *extra] if isinstance(token, (str, AddedToken))}
        known |= {i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in read("added_tokens.json").items()}
        known |= own
    by_text = {token.content: token for token in known.values() if token}
    named = [by_text.get(text_of(token), token) for token in map(token_of, named) if token]
    named += filter(None, map(token_of, own_names.values()))
    adding = [token for _, token in sorted(known.items()) if token]  # tokens of tokenizer.json again, because they may become special
    texts = {token.content for token in [*own.values(), *adding]}
    for token in [*named, *map(token_of, extra + late)]:
        if text_of(token) not in texts and token not in adding:
            adding.append(token)
    adding = [AddedToken(token, special=True) if isinstance(token, str) else token for token in adding]
    for token in adding:
        token.special = token.special or token.content in set(map(text_of, named))
    return adding


def load(path):
    """Raises ValueError for files that cannot be read."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        own = max(tokenizer.get_vocab(True).values(), default=-1) + 1
        tokenizer.add_tokens(find(templates.folder_of(path), tokenizer))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: cannot be read as a tokenizer, with the tokens that other files of its folder add ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return content, tokenizer, own
