"""What moto's S3 server cannot show: `make stores` runs this file against the others, by its name."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from conftest import Command
from proxy import fault_proxy
from s3 import Bucket
from tokenmill.errors import StorageError
from tokenmill.storage.base import open_folder
from tokenmill.storage.object_folder import ObjectFolder

# A secret that is none of the server's: base64, as Azure wants it.
WRONG = "d3JvbmctZXhhbXBsZS1zZWNyZXQ="


def is_azure(bucket: Bucket) -> bool:
    return bucket.url.startswith("az:")


def test_whoever_has_the_wrong_secret_is_told_so_at_once(
    bucket: Bucket, corpus: Path, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "AZURE_STORAGE_ACCOUNT_KEY" if is_azure(bucket) else "GOOGLE_BEARER_TOKEN"
    monkeypatch.setenv(variable, WRONG)
    with fault_proxy(bucket.endpoint) as proxy:
        for name, value in bucket.through(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        for line in (
            ("prepare", corpus, "-o", f"{bucket.url}/out", "--tokenizer", "byte", "-v"),
            ("prepare", f"{bucket.url}/corpus/*.jsonl", "-o", "out", "--tokenizer", "byte"),
            ("verify", f"{bucket.url}/out"),
            ("pull", f"{bucket.url}/out", "back"),
        ):
            before = proxy.requests
            said = tokenmill(*line, code=1)
            assert "check the credentials" in said.stderr
            assert WRONG not in said.stdout + said.stderr
            assert proxy.requests - before == 1, "nothing is asked again"


def test_a_bucket_that_is_not_there_is_told_at_once(bucket: Bucket, corpus: Path, tokenmill: Command) -> None:
    nowhere = f"{bucket.url}-nowhere"
    for line in (
        ("prepare", corpus, "-o", f"{nowhere}/out", "--tokenizer", "byte"),
        ("prepare", f"{nowhere}/corpus", "-o", "out", "--tokenizer", "byte"),
        ("verify", f"{nowhere}/out"),
    ):
        assert f"{nowhere} does not exist" in tokenmill(*line, code=1).stderr


def test_more_objects_than_a_list_has_on_its_first_page(bucket: Bucket) -> None:
    """Azure's has 5,000, S3's and Google's 1,000."""
    names = [f"{number:05}" for number in range(5_100 if is_azure(bucket) else 1_100)]
    folder = open_folder(f"{bucket.url}/out")
    assert isinstance(folder, ObjectFolder)
    for _ in folder.each(lambda name: folder.replace(f"many/{name}", b"x"), names, ahead=8):
        pass
    assert folder.names("many") == names
    assert [found.key for found in folder.store.under("out/many")] == [f"out/many/{name}" for name in names]


def test_a_signature_is_enough_and_is_told_to_nobody(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_azure(bucket):
        pytest.skip("Azure's alone")
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    from azurite import ACCOUNT, KEY

    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    rights = ContainerSasPermissions(read=True, write=True, list=True, delete=True)
    signature = generate_container_sas(ACCOUNT, bucket.name, account_key=KEY, permission=rights, expiry=end)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature)
    folder = open_folder(f"{bucket.url}/out")
    digest = folder.write("a", b"tokens")
    folder.link("a", "b", digest)
    folder.remove_all(["a", "nothing"])
    assert folder.names() == ["b"]
    with pytest.raises(StorageError) as caught:
        open_folder(f"{bucket.url}-nowhere/out").write("a", b"tokens")
    assert signature.rpartition("sig=")[2] not in f"{caught.value} {caught.value.hint}"
