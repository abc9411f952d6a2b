"""Corpora of GPT-2 tokens, and GPT-2's encoding."""

from __future__ import annotations

from splitfg_lab.data.specs import Download, FileSet, TextSet, TextSplit

_GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


def _wikitext(split: str, count: int) -> TextSplit:
    return TextSplit(
        split,
        lines=(f"wiki.{split}.raw",),
        tokens=(f"wikitext103-{split}*.u16*", f"wikitext103-{split}*.bin*"),
        count=count,
    )


WIKITEXT103 = TextSet(
    name="wikitext103",
    title="WikiText-103 raw, GPT-2 BPE (train, valid, test)",
    origin="Merity et al. 2017, wikitext-103-raw-v1",
    licence="CC BY-SA 3.0",
    verified="checksum of the archive; tokens of every split are counted",
    downloads=(
        Download(
            "text/wikitext-103-raw-v1.zip",
            (
                "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/"
                "3555105b17ae31cc619a136fac72dbe2865c3738/wikitext-103-raw-v1.zip",
                "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-raw-v1.zip",
            ),
            "sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        ),
    ),
    raw=(
        "text/wiki.{split}.raw",
        "text/wikitext-103-raw/wiki.{split}.raw",
        "text/wikitext103-{split}*",
        "text/wikitext-103-raw-v1.zip",
    ),
    vocabulary=50_257,
    splits=(
        _wikitext("train", 119_085_169),
        _wikitext("valid", 249_750),
        _wikitext("test", 286_178),
    ),
)

WIKIPEDIA = TextSet(
    name="wikipedia",
    title="English Wikipedia articles as tokens, the stand-in for WikiText-103's training split",
    origin=(
        "English Wikipedia, WikiText-style spacing, articles of WikiText's validation and test splits removed, "
        "articles shuffled, GPT-2 BPE; as many tokens as WikiText-103's training split"
    ),
    licence="CC BY-SA",
    verified="number of tokens and checksum of the token stream",
    raw=("text/wiki-train.*.u16.xz", "text/wikipedia-train*"),
    by_hand="it is not published: copy its token files (wiki-train.0.u16.xz, wiki-train.1.u16.xz, ...) to text/",
    vocabulary=50_257,
    splits=(
        TextSplit(
            "train",
            tokens=("wiki-train*.u16*", "wikipedia-train*.u16*", "wikipedia-train*.bin*"),
            count=119_085_169,
            sha256="8dd4e33f35dfa1a2dc86a9229a43311cdc1a66d14a61b2df4470b552b89a0bfa",
        ),
    ),
)

GPT2_BPE = FileSet(
    name="gpt2_bpe",
    title="GPT-2 byte-pair encoding (50,257 tokens)",
    origin="OpenAI, Radford et al. 2019",
    licence="MIT",
    verified="checksum of every file, as tiktoken pins them",
    downloads=(
        Download(
            "text/gpt2_bpe/encoder.json",
            (_GPT2 + "encoder.json",),
            "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        ),
        Download(
            "text/gpt2_bpe/vocab.bpe",
            (_GPT2 + "vocab.bpe",),
            "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        ),
    ),
    raw=("text/gpt2_bpe",),
    files=(
        ("encoder.json", "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        ("vocab.bpe", "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    ),
)
