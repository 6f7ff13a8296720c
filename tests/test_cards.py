# SPDX-License-Identifier: Apache-2.0
"""Model cards: what they say is in the files, what was not measured is not in them, and no name is markup."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from tiny_models import case, source

import demo_card
import hf_mxfp4
from hf_mxfp4 import FP4Config
from hf_mxfp4.checkpoint_files import read_checkpoint
from hf_mxfp4.hub import push, render_card, write_card
from hf_mxfp4.hub.card import is_ours, licence_of
from hf_mxfp4.hub.errors import fingerprint
from hf_mxfp4.hub.errors import read as read_errors
from hf_mxfp4.hub.markdown import code, command, comment, fenced, plain
from hf_mxfp4.inspection import inspect_checkpoint
from hf_mxfp4.streaming import quantize_checkpoint
from hf_mxfp4.verification import verify_checkpoint

ROOT = Path(__file__).parents[1]
MEASURED = {
    "model": "x",
    "text": "wikitext2",
    "tokens": 32768,
    "perplexity": {"mean": 18.604, "error": 0.311},
    "kl": {"mean": 0.03701, "error": 0.0005},
    "perplexity_increase": {"mean": 0.0214, "error": 0.001},
    "reference": {"model": "demo_lm", "perplexity": {"mean": 18.21, "error": 0.31}},
    "tasks": {"piqa": {"metric": "acc", "mean": 0.791, "error": 0.0095, "samples": 1838}},
    "command": "hf-mxfp4 evaluate x --text wikitext2",
    "device": "cpu",
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(case("llama", "nvfp4").folder, tmp_path / "tiny-nvfp4")


def metadata(card: ModelCard) -> dict:
    """What the Hub reads."""
    text = str(card)
    assert ModelCard(text).data.to_dict() == card.data.to_dict()
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])


def change(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def quantized(folder: Path, **fields) -> Path:
    case("llama", fields.pop("format", "nvfp4")).quantize(**fields).save_pretrained(folder)
    return folder


def test_metadata(folder):
    card = render_card(folder, base_model="meta-llama/Llama-3.2-1B")
    bits = round(inspect_checkpoint(read_checkpoint(folder)).bits_per_weight, 3)
    assert metadata(card) == {
        "base_model": "meta-llama/Llama-3.2-1B",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["fp4", "nvfp4", "hf_mxfp4", "compressed-tensors"],
        "quantization": {"format": "nvfp4", "layout": "portable", "bits_per_weight": bits},
    }
    assert "base_model" not in metadata(render_card(folder))
    for wrong in ("not a name", "a/b/c", "../x/y", "a/b\nlicense: mit"):
        with pytest.raises(ValueError, match="is not the name of a model on the Hub"):
            render_card(folder, base_model=wrong)


def test_figures_are_those_of_the_files(folder):
    text = render_card(folder).text
    tensors = read_checkpoint(folder).tensors
    packed = {name: t for name, t in tensors.items() if re.search(r"weight_(packed|scale|global_scale)$", name)}
    nbytes = sum(t.nbytes for t in packed.values())
    weights = sum(2 * t.nbytes for name, t in packed.items() if name.endswith("packed"))
    assert f"{weights:,} weights" in text and f"| packed | {nbytes:,} bytes |" in text
    assert f"| bits per packed weight | {8 * nbytes / weights:.4g}," in text
    rest = sum(t.nbytes for name, t in tensors.items() if name not in packed)
    assert f"| in full precision | {rest:,} bytes |" in text
    assert 'FP4Config(format="nvfp4", scale_rule="soar")' in text
    for version in (hf_mxfp4.__version__, torch.__version__, transformers.__version__):
        assert version in text


def test_what_was_not_measured_is_left_out(folder):
    text = render_card(folder).text
    for word in ("## Measured", "perplexity", "KL", "mean", "Made by", "![", "None", "nan", "{{", "{%"):
        assert word not in text, word
    assert "How much was not measured" in text


def test_evaluation(folder):
    (folder / "evaluation.json").write_text(json.dumps(MEASURED))
    text = render_card(folder).text
    for row in (
        "| perplexity | 18.60 ± 0.31 |",
        "| perplexity of `demo_lm` | 18.21 ± 0.31 |",
        "| KL divergence, nats per token | 0.0370 ± 0.0005 |",
        "| increase of perplexity | 2.14 ± 0.10 % |",
        "| `piqa`, `acc` | 0.7910 ± 0.0095 (1,838 samples) |",
        "On 32,768 tokens of `wikitext2`, against `demo_lm` (device: `cpu`)",
        "By `hf-mxfp4 evaluate x --text wikitext2` (`torch` `2.13.0`).",
    ):
        assert row in text
    assert render_card(folder, measured=MEASURED).text == text
    assert "How much was not measured" not in text
    for nothing in ({}, {"text": "x", "tokens": 3}):
        text = render_card(folder, measured=nothing).text
        assert "## Measured" not in text and "How much was not measured" in text
    rounded = render_card(folder, measured=MEASURED | {"activation_format": "same"}).text
    assert "(device: `cpu`), with activations rounded to 4 bits; ±" in rounded
    alone = render_card(folder, measured={"perplexity": {"mean": 5.0}}).text
    assert "| perplexity | 5.00 |" in alone and "KL" not in alone and "Measured; ±" in alone
    for wrong in ({"perplexity": 5.0}, {"kl": {"mean": "low"}}, {"tasks": [1]}, {"perplexity": {"error": 1}}):
        with pytest.raises(ValueError, match="hf-mxfp4 evaluate"):
            render_card(folder, measured=wrong)


def test_errors_are_measured_against_the_source(folder):
    path = write_card(folder, source=source("llama"), command="hf-mxfp4 quantize llama tiny-nvfp4")
    text, found = path.read_text(), json.loads((folder / "error.json").read_text())
    expected = verify_checkpoint(folder, source("llama")).errors
    assert found["errors"] == expected and len(expected) == 14
    worst = max(expected, key=expected.get)
    assert f"mean {sum(expected.values()) / 14:.5f}" in text and f"| `{worst}` | {expected[worst]:.5f} |" in text
    assert "](error.png)" in text and (folder / "error.png").read_bytes().startswith(b"\x89PNG")
    assert "hf-mxfp4 quantize llama tiny-nvfp4" in text
    again = render_card(folder)
    assert str(again) == text, "facts of the earlier card, and error.json, were not taken over"


def test_errors_of_another_checkpoint_are_not_shown(folder):
    write_card(folder, source=source("llama"))
    config = read_checkpoint(folder).quantization
    assert read_errors(folder, config) is not None
    changed = config["hf_mxfp4"] | {"scale_rule": "amax", "search": "full"}
    change(folder, quantization_config=config | {"hf_mxfp4": changed})
    assert "Error of the packed weights" not in render_card(folder).text
    (folder / "error.json").write_text('{"errors": {"x": "0.1"}}')
    with pytest.raises(ValueError, match="error.json holds no errors by name"):
        render_card(folder)


def test_measurements_of_other_weights_are_not_shown(folder):
    """Another model saved over this one, with the same config and the same sizes."""
    write_card(folder, source=source("llama"))
    measured = {"perplexity": {"mean": 5.0, "error": 0.1}, "weights": fingerprint(folder)}
    (folder / "evaluation.json").write_text(json.dumps(measured))
    text = render_card(folder).text
    assert "Error of the packed weights" in text and "| perplexity | 5.00 ± 0.10 |" in text
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 1
    path.write_bytes(content)
    text = render_card(folder).text
    assert "## Measured" not in text and "How much was not measured" in text
    left_out = push(folder, "alice/x", dry_run=True).left_out
    assert set(left_out) == {"error.json", "error.png", "evaluation.json"}
    (folder / "error.json").unlink()
    (folder / "evaluation.json").write_text("{}")
    assert not push(folder, "alice/x", dry_run=True).left_out


def test_a_fingerprint_sees_each_matrix_of_a_large_file(tmp_path):
    """1 MB of 40 is read, and no matrix of 1 MB escapes."""
    path, found = tmp_path / "model.safetensors", set()
    tensors = {f"{i:02}": torch.zeros(1_000_000, dtype=torch.uint8) for i in range(40)}
    for changed in ("00", "13", "39", "none"):
        save_file({name: tensor + (name == changed) for name, tensor in tensors.items()}, path)
        found.add(fingerprint(tmp_path))
    assert len(found) == 4


def test_another_source_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="do not belong together"):
        write_card(folder, source=source("qwen3"))
    assert not (folder / "README.md").exists() and not (folder / "error.json").exists()


LICENCES = {
    "---\nlicense: apache-2.0\n---\n": {"license": "apache-2.0"},
    "---\nlicense: other\nlicense_name: llama3.2\nlicense_link: LICENSE\n---\n": {
        "license": "other",
        "license_name": "llama3.2",
        "license_link": "LICENSE",
    },
    "---\nlicense: [mit, x]\n---\n": {},
    "---\nlicense: 'MIT: or\n  not'\n---\n": {"license": "MIT: or not"},
    "---\n- 1\n---\n": {},
    "---\n: [\n---\n": {},
    "no metadata": {},
}


@pytest.mark.parametrize("readme", LICENCES)
def test_licence_is_inherited(tmp_path, readme):
    (tmp_path / "README.md").write_text(readme)
    assert licence_of(tmp_path) == LICENCES[readme]


def test_a_model_in_the_cache_has_its_name_and_licence(folder, tmp_path):
    """Its folder is named by a commit. A link to a file that was not copied leads to the original."""
    snapshot = tmp_path / "models--alice--the-original" / "snapshots" / ("a" * 40)
    shutil.copytree(source("llama"), snapshot)
    (snapshot / "README.md").write_text(list(LICENCES)[1])
    path = write_card(folder, source=snapshot)
    text, data = path.read_text(), metadata(ModelCard.load(path))
    assert "aaaa" not in text and "weights of `alice/the-original`" in text
    assert data["base_model"] == "alice/the-original"
    assert data["license_link"] == "https://huggingface.co/alice/the-original/blob/main/LICENSE"
    (folder / "LICENSE").write_text("text")
    assert metadata(ModelCard.load(write_card(folder, source=snapshot)))["license_link"] == "LICENSE"


@pytest.mark.parametrize("readme", list(LICENCES)[:4])
def test_licence_in_the_card(folder, tmp_path, readme):
    original = shutil.copytree(source("llama"), tmp_path / "original")
    (original / "README.md").write_text(readme)
    card = ModelCard.load(write_card(folder, source=original))
    valid = LICENCES[readme] if "MIT:" not in readme else {}
    assert {key: value for key, value in metadata(card).items() if "license" in key} == valid
    assert metadata(render_card(folder)) == metadata(card), "not taken over from the earlier card"


def test_cards_of_users_are_not_overwritten(folder, tmp_path):
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    with pytest.raises(ValueError, match="README.md was not made by hf-mxfp4"):
        write_card(folder)
    output = write_card(folder, tmp_path / "card.md", source=source("llama"))
    assert "](card.png)" in output.read_text() and (tmp_path / "card.png").is_file()
    assert {"error.json", "error.png"}.isdisjoint(path.name for path in folder.iterdir())
    assert write_card(folder, output) == output
    assert is_ours(output.read_text()) and not is_ours("# card\n<!-- hf-mxfp4 card -->")
    output.write_text(re.sub(r"card \{.*\}", "card {broken}", output.read_text()))
    shutil.copy(output, folder / "README.md")
    with pytest.raises(ValueError, match="comment was edited"):
        render_card(folder)


def test_nothing_else_is_written_over(folder, tmp_path, monkeypatch):
    """Said before anything is measured; a link is replaced by a file, and what it leads to stays."""
    write_card(folder)
    (tmp_path / "blob").write_text((folder / "README.md").read_text())
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "blob")
    before = (tmp_path / "blob").read_text()
    assert "a new command" in write_card(folder, command="a new command").read_text()
    assert (tmp_path / "blob").read_text() == before and not (folder / "README.md").is_symlink()
    monkeypatch.setattr("hf_mxfp4.hub.card.verify_checkpoint", None)
    (tmp_path / "card.png").write_bytes(b"mine")
    for output, message in {
        tmp_path / "card.md": "card.png is there already",
        tmp_path / "none" / "card.md": "none is not a folder. Make it",
        tmp_path: "is a folder. Name a file",
    }.items():
        with pytest.raises(ValueError, match=message):
            write_card(folder, output, source=source("llama"))
    assert (tmp_path / "card.png").read_bytes() == b"mine"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install hf-mxfp4\[plot\]"):
        write_card(folder, source=source("llama"))


@pytest.mark.parametrize(
    "fields, siblings",
    [
        ({"overrides": {"k_proj": "skip"}}, "q_proj, k_proj and v_proj"),
        ({"overrides": {"up_proj": {"format": "mxfp4"}}}, "gate_proj and up_proj"),
        ({"overrides": {"down_proj": "skip"}}, ""),
    ],
)
def test_vllm_wants_siblings_in_one_format(tmp_path, fields, siblings):
    text = render_card(quantized(tmp_path / "x", **fields)).text
    assert ("vllm serve" in text) == (not siblings)
    assert (f"vLLM does not load it: it makes one layer of {siblings}," in text) == bool(siblings)


def test_who_rounds_activations(tmp_path):
    """A portable checkpoint says weight-only to other readers."""
    text = render_card(quantized(tmp_path / "x", activation_format="same")).text
    assert "hf_mxfp4 rounds activations to 4 bits too" in text and "vLLM and transformers keep them." in text
    assert "ctivations" not in render_card(case("llama", "nvfp4").folder).text


@pytest.mark.parametrize("name", ["portable", "experts", "macro", "foreign", "bert"])
def test_who_can_load_it(name, tmp_path):
    folder = {
        "portable": lambda: case("llama", "mxfp4").folder,
        "experts": lambda: case("qwen3_moe", "nvfp4").folder,
        "macro": lambda: quantized(tmp_path / "macro", format="mxfp4", macro_block="search"),
        "foreign": lambda: shutil.copytree(case("llama", "nvfp4").folder, tmp_path / "foreign"),
        "bert": lambda: case("bert", "nvfp4").folder,
    }[name]()
    if name == "foreign":
        config = read_checkpoint(folder).quantization
        change(folder, quantization_config={key: value for key, value in config.items() if key != "hf_mxfp4"})
    text = render_card(folder, repo_id="alice/tiny").text
    assert ("vllm serve alice/tiny" in text) == (name in ("portable", "foreign"))
    assert ("With transformers alone" in text) == (name in ("portable", "foreign", "bert"))
    assert ("is read by hf_mxfp4 only" in text) == (name in ("experts", "macro"))
    assert ("(fused experts)" in text, "(macro-blocks)" in text) == (name == "experts", name == "macro")
    assert ("hf_mxfp4.load(" in text) == (name == "foreign") and ("FP4Config(" in text) == (name != "foreign")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2 if name != "foreign" else blocks
    for block in blocks:
        compile(block, name, "exec")
        assert "FP4Config(" in block or "from_pretrained" in block or "load(" in block


def test_the_config_it_shows_is_the_checkpoints(tmp_path):
    fields = {"overrides": {r"layers\.0": {"format": "mxfp4"}, "k_proj": "skip"}, "iterations": 3}
    folder = quantized(tmp_path / "x", **fields)
    shown = re.search(r"^FP4Config\(.*\)$", render_card(folder).text, re.MULTILINE)[0]
    assert eval(shown, {"FP4Config": FP4Config}).to_dict() == FP4Config(**fields).to_dict()


def test_what_is_no_quantized_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="a card is made of a quantized checkpoint"):
        render_card(source("llama"))
    with pytest.raises(ValueError, match="is not a folder"):
        render_card(tmp_path / "none")


HOSTILE = (
    "x](http://evil) <script>alert(1)</script> `code` | a | b |",
    "a\n---\nlicense: mit\n---\n# heading",
    "``` \n\n![x](y)\n```",
    "--> <img src=x>\u202etxt.exe",
    "{{ 7 * 7 }} {% raw %}",
    '"); import os; os.system("x") #',
)


@pytest.mark.parametrize("text", HOSTILE)
def test_names_are_not_markup(folder, text):
    """Rendered by a Markdown parser, no name from a config, a file or a command makes an element."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    change(folder, transformers_version=text, model_type="llama")
    quantization = read_checkpoint(folder).quantization
    quantization["hf_mxfp4"] |= {"modules_to_not_convert": [text], "calibration": text}
    change(folder, quantization_config=quantization)
    errors = {"source": text, "quantization_config": quantization, "errors": {text: 0.01, "b": 0.02}}
    (folder / "error.json").write_text(json.dumps(errors))
    measured = MEASURED | {"text": text, "command": text, "device": text, "versions": {text: text}}
    measured |= {"reference": {"model": text}, "tasks": {text: {"metric": text, "mean": 1.0}}}
    harmless = render_card(folder, command="x", measured=MEASURED, repo_id="alice/x")
    card = render_card(folder, command=text, measured=measured, repo_id=text)
    assert metadata(card) == metadata(harmless)

    def elements(card):
        found = [token for block in markdown.parse(card.text) for token in [block, *(block.children or ())]]
        kinds = [token.type for token in found]
        return [kinds.count(kind) for kind in ("heading_open", "link_open", "image", "html_inline", "fence", "hr")] + [
            [token.content for token in found if token.type == "html_block"] and kinds.count("html_block")
        ]

    assert elements(card) == elements(harmless)
    for block in re.findall(r"^(`{3,})python\n(.*?)^\1$", card.text, re.MULTILINE | re.DOTALL):
        compile(block[1], "card", "exec")


def test_the_demo_card_is_what_the_commands_make(tmp_path):
    """model_cards/, made by scripts/demo_card.py; here without measuring perplexity again."""
    output, name = tmp_path / demo_card.NAME, f"{demo_card.NAME}.md"
    quantize_checkpoint(ROOT / demo_card.SOURCE, output, FP4Config())
    measured = json.loads((demo_card.CARDS / f"{demo_card.NAME}.json").read_text(encoding="utf-8"))
    del measured["weights"]  # their last bits may be other ones on another machine
    (output / "evaluation.json").write_text(json.dumps(measured))
    made = write_card(output, tmp_path / name, source=ROOT / demo_card.SOURCE, command=demo_card.COMMAND)

    def text(path):
        return re.sub(r"(hf\\_mxfp4|torch|transformers) \d[\w.+]*\w", r"\1 VERSION", path.read_text(encoding="utf-8"))

    assert text(made) == text(demo_card.CARDS / name)
    assert "transformers VERSION" in text(made) and metadata(ModelCard.load(made))
    assert (demo_card.CARDS / f"{demo_card.NAME}.png").read_bytes().startswith(b"\x89PNG")


def test_pieces_of_markdown():
    assert code("a") == "`a`" and code("`") == "`` ` ``" and code("a|b") == r"`a\|b`"
    assert plain("a_b*c<d>") == r"a\_b\*c&lt;d\>" and plain("x" * 400).endswith("xx ...")
    assert fenced("a ``` b", "sh") == "````sh\na ``` b\n````"
    assert "--" not in comment({"a": "-->"}) and json.loads(comment({"a": "--><"})) == {"a": "--><"}
    assert plain("\ud800") == "?" and command("a | b") == "`a | b`"


def test_a_token_in_a_command_is_not_shown(folder):
    secret = "HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123 hf-mxfp4 push x"
    card = render_card(folder, command=secret, measured=MEASURED | {"command": secret})
    assert "hf_AbCd" not in str(card) and "hf-mxfp4 push x" in str(card)


def test_a_command_is_shown_whole(folder):
    assert f"{'x' * 1000} --end" in render_card(folder, command=f"hf-mxfp4 quantize {'x' * 1000} --end").text
