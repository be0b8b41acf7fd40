"""Loads the tokenizer of a checkpoint, without transformers where the result is certain to be the
same.

Importing transformers takes over a second, and its AutoTokenizer imports torch if that is
installed. So a folder whose tokenizer.json is complete is read by the tokenizers library, which
transformers itself uses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from enginebay.contracts.text import Tokenizer
from enginebay.errors import CheckpointError, shown, shown_text
from enginebay.regular_files import read_regular
from enginebay.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from enginebay_models.checkpoint import MAX_JSON_BYTES, read_json, silence_advice

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Classes that use tokenizer.json unchanged; other classes may change it.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Settings with which transformers changes tokenizer.json.
_OVERRIDES = (
    "add_bos_token",
    "add_eos_token",
    "split_special_tokens",
    "auto_map",
    "tokenizer_padding",
)

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in `folder`; CheckpointError when it is missing or cannot be read.

    Remote code is never run.
    """
    if not any((folder / name).is_file() for name in _FILES):
        allowed = f"one of {', '.join(_FILES)}"
        given = f"{folder} has no tokenizer"
        raise CheckpointError(given, allowed, "Copy the model's tokenizer files into the folder.")
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    _check_settings(config)
    _check_sentencepiece(folder)
    if _may_be_plain(folder, config):
        plain = PlainTokenizer(folder, config)
        if plain.says_all(config):
            return TextTokenizer(plain)
    return TextTokenizer(_from_transformers(folder, config.get("tokenizer_class")))


def _check_sentencepiece(folder: Path) -> None:
    """Raise CheckpointError for a SentencePiece model alone that the library is missing for."""
    path = folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file() or not path.is_file():
        return
    with path.open("rb") as file:
        is_protobuf = file.read(1) == b"\n"  # the first field; a file of tiktoken is a text
    missing = [
        name
        for name, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf"))
        if is_protobuf and not _has_module(module)
    ]
    if missing:
        raise CheckpointError(
            f"{folder} has its tokenizer as a SentencePiece model only (tokenizer.model), and "
            f"{' and '.join(missing)} is not installed",
            "tokenizer.json, or tokenizer.model with the packages sentencepiece and protobuf",
            "Install them with pip install 'enginebay[sentencepiece]', or copy the tokenizer.json "
            "that a newer release of the model has.",
        )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that the module is in
        return False


def as_transformers(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """Return a loaded tokenizer as a class of transformers; CheckpointError when transformers
    cannot read it.
    """
    inner = tokenizer.inner
    return inner.full if isinstance(inner, PlainTokenizer) else inner


def _check_settings(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field of tokenizer_config.json with a wrong type."""
    templates, added = config.get("chat_template"), config.get("added_tokens_decoder", {})
    rules = {
        "tokenizer_class": (isinstance(config.get("tokenizer_class"), str | None), "a name"),
        "chat_template": (
            isinstance(templates, str | list | dict | None),
            "a text, or several by name",
        ),
        "added_tokens_decoder": (
            isinstance(added, dict)
            and all(id_.isdecimal() and _is_added(t) for id_, t in added.items()),
            "an object from token ids to tokens",
        ),
    }
    for name, value in config.items():
        if name.endswith(("_token", "_special_tokens")) and not isinstance(value, bool):
            rules[name] = (
                all(_is_token(v) for v in _listed(name, value)),
                "a token, or a list of tokens",
            )
    for name, (is_right, allowed) in rules.items():
        if not is_right:
            given = f"tokenizer_config.json has {shown_text(name, 60)} = {shown(config[name])}"
            raise CheckpointError(given, allowed, "Fetch the file again.")


def _is_token(value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("content"), str)
    return isinstance(value, str | None)


def _is_added(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return isinstance(value.get("special", False), bool)


def _listed(name: str, value: Any) -> list[Any]:
    """Return the tokens of a field: one, a list, or the values of an object."""
    if name == "extra_special_tokens" and isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _may_be_plain(folder: Path, config: Mapping[str, Any]) -> bool:
    if config.get("tokenizer_class") not in _GENERIC or any(name in config for name in _OVERRIDES):
        return False
    if not isinstance(config.get("chat_template"), str | None):
        return False  # several templates by name
    model = folder / "config.json"
    if model.is_file() and "mistral" in str(read_json(model).get("model_type")):
        return False  # transformers corrects the pattern of some tokenizers
    more = ("special_tokens_map.json", "added_tokens.json")
    return (folder / "tokenizer.json").is_file() and not any(
        (folder / name).is_file() for name in more
    )


def _named_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that the configuration names by role, such as eos_token."""
    for name, value in config.items():
        if name.endswith(("_token", "_special_tokens")):
            values = _listed(name, value)
            yield from (
                v["content"] if isinstance(v, dict) else str(v) for v in values if v is not None
            )


class PlainTokenizer:
    """A tokenizer from tokenizer.json only.

    It has the methods of a fast tokenizer of transformers that `enginebay.contracts.text.Tokenizer`
    calls.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (
            BaseException
        ) as error:  # the library raises bare Exceptions, and a panic of Rust is not even one
            _raise_what_is_not_the_librarys(error)
            given = f"{path} cannot be read: {shown_text(str(error))}"
            raise CheckpointError(
                given, "a tokenizer of the tokenizers library", "Fetch the file again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self.chat_template: str | None = _read_template(folder, config)
        self.special_tokens_map = {
            name: value["content"] if isinstance(value, dict) else str(value)
            for name in _ROLES
            if (value := config.get(name)) is not None
        }
        """Special tokens by role; chat templates have them as variables."""

    def says_all(self, config: Mapping[str, Any]) -> bool:
        """Return whether tokenizer.json has every token that transformers would add."""
        tokens = self._tokenizer.get_added_tokens_decoder()
        known = {(id_, token.content, token.special) for id_, token in tokens.items()}
        added = config.get("added_tokens_decoder", {}).items()
        same = all(
            (int(i), token["content"], token.get("special", False)) in known for i, token in added
        )
        special = {token.content for token in tokens.values() if token.special}
        return same and all(name in special for name in _named_tokens(config))

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the tokenizers library; transformers has the same name for it."""
        return self._tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Other threads run meanwhile."""
        # `encode` would hold the GIL for the whole text.
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Return the text of token ids."""
        if clean_up_tokenization_spaces:
            return self.full.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=True,
            )
        # `decode` would hold the GIL for the whole text.
        ids = [list(token_ids)]
        [text] = self._tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)
        found: str = text
        return found

    @cached_property
    def full(self) -> HuggingFaceTokenizer:
        """Load the same tokenizer by transformers."""
        return _from_transformers(self._folder, "PreTrainedTokenizerFast")


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the chat template of a folder; CheckpointError when its file is not text."""
    path = folder / "chat_template.jinja"
    if not path.exists():
        template: str | None = config.get("chat_template")
        return template
    try:
        return read_regular(path, MAX_JSON_BYTES).decode()
    except (OSError, ValueError) as error:
        given = f"{path} cannot be read: {shown_text(str(error))}"
        raise CheckpointError(given, "a text in UTF-8", "Fetch the file again.") from error


def _raise_what_is_not_the_librarys(error: BaseException) -> None:
    """Raise `error` again if it ends this program; a panic of Rust does not."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def _from_transformers(folder: Path, kind: str | None) -> HuggingFaceTokenizer:
    silence_advice()
    # The generic class, because AutoTokenizer would import torch and the configuration of every
    # model.
    if kind in _GENERIC:
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        loaded: HuggingFaceTokenizer = Loader.from_pretrained(str(folder), trust_remote_code=False)
        ids = loaded.encode("a", add_special_tokens=True)  # some settings are first read by a call
        loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    except BaseException as error:  # a malformed file can raise any error
        _raise_what_is_not_the_librarys(error)
        reason = shown_text(str(error).strip().partition("\n")[0]) or type(error).__name__
        given = f"the tokenizer in {folder} cannot be loaded: {reason}"
        todo = "Fetch its files again. Tokenizers that need code of their own are not supported."
        raise CheckpointError(given, "a tokenizer that transformers knows", todo) from error
    return loaded
