"""The helper that takes the code blocks out of a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from document_blocks import blocks, the_block

DOCUMENT = """# Title

Text:

    #!/bin/sh
    if true; then

        echo indented
    fi

<!-- not run: needs a GPU -->

    nvidia-smi

- a list

    its text, and no block

```python
print("    four")
```

<!-- not run: -->
~~~
~~~
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "d.md"
    file.write_text(DOCUMENT)
    return file


def test_blocks_come_as_they_stand(document: Path) -> None:
    shell, marked, python, empty = blocks(document)
    assert shell.text == "#!/bin/sh\nif true; then\n\n    echo indented\nfi\n" and shell.line == 5
    assert (marked.text, marked.not_run) == ("nvidia-smi\n", "needs a GPU")
    assert (python.text, python.language, python.not_run) == ('print("    four")\n', "python", None)
    # A mark without a reason is none.
    assert empty.not_run is None


def test_the_block_is_the_only_one(document: Path) -> None:
    assert the_block(document, "echo indented").line == 5
    with pytest.raises(AssertionError, match="stands in 0 blocks"):
        the_block(document, "nowhere")
    with pytest.raises(AssertionError, match="stands in 4 blocks"):
        the_block(document, "")
