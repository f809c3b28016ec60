"""Which spellings and addresses may be reached."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.addresses import FORBIDDEN_ADDRESSES, FORBIDDEN_HOSTS, PUBLIC_HOSTS
from stillroom.errors import InputError
from stillroom.tools.browser.addresses import (
    AddressBlockedError,
    AddressPolicy,
    Target,
    non_public_reason,
)

PUBLIC = AddressPolicy()


def test_corpus_is_as_large_as_promised() -> None:
    assert len(FORBIDDEN_HOSTS) >= 60


@pytest.mark.parametrize("host", FORBIDDEN_HOSTS)
def test_forbidden_spelling_is_refused_in_a_url(host: str) -> None:
    for url in (f"http://{host}", f"https://{host}", f"HTTP://{host}:8080/x?y#z"):
        with pytest.raises(AddressBlockedError):
            PUBLIC.check_url(url)


@pytest.mark.parametrize("address", FORBIDDEN_ADDRESSES)
def test_public_name_may_not_lead_to_a_forbidden_address(address: str) -> None:
    target = PUBLIC.check_url("https://example.com")
    with pytest.raises(AddressBlockedError, match=r"example\.com"):
        PUBLIC.check_address(address, target)


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_public_spelling_passes(host: str) -> None:
    assert PUBLIC.check_url(f"https://{host}/path").port == 443
    assert PUBLIC.check_url(f"http://{host}:8080").port == 8080


def test_host_comes_back_in_one_spelling() -> None:
    assert PUBLIC.check_url("http://EXAMPLE.com") == Target("example.com", 80)
    assert PUBLIC.check_url("http://m\u00fcnchen.de") == Target("xn--mnchen-3ya.de", 80)
    target = PUBLIC.check_url("https://[2606:4700:4700:0::1111]")
    assert target == Target("2606:4700:4700::1111", 443)
    assert str(target) == "[2606:4700:4700::1111]:443"


@pytest.mark.parametrize(
    "url",
    [
        "", "example.com", "//example.com", "ftp://example.com", "file:///etc/passwd",
        "javascript:alert(1)", "data:text/html,x", "about:blank", "chrome://version",
        "view-source:https://example.com", "blob:https://example.com/1", "ws://example.com",
        "https://user@example.com", "https://user:pw@example.com", "https://example.com@127.0.0.1",
        "https://127.0.0.1#@example.com", "https:///example.com", "https:example.com", "https://",
        "https://exa mple.com", " https://example.com", "https://example.com\n", "https://e\tx.com",
        "https://example.com\\@127.0.0.1", "https:\\\\example.com", "https://example.com:",
        "https://example.com:99999", "https://example.com:0", "https://example.com:80:80",
        "https://example.com:\u0661", "https://-.com", "https://a..b", "https://.com",
        "https://[::1", "https://[1.2.3.4]", "https://exa|mple.com", "https://" + "a" * 64 + ".com",
    ],
)  # fmt: skip
def test_what_is_no_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(AddressBlockedError):
        PUBLIC.check_url(url)


@pytest.mark.parametrize("port", [1, 22, 25, 53, 110, 143, 465, 587, 993, 6000, 6667, 10080])
def test_ports_that_browsers_refuse_are_refused_also_where_the_host_is_allowed(port: int) -> None:
    for policy in (PUBLIC, AddressPolicy([f"example.com:{port}", "example.com"])):
        with pytest.raises(AddressBlockedError, match="port"):
            policy.check_url(f"http://example.com:{port}")


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/x", "http://127.0.0.1:8001"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/x", "http://localhost:8000"),
        ("127.0.0.1", "http://127.0.0.1:9000", "http://127.0.0.2:9000"),
        ("[::1]:8000", "http://[::1]:8000", "http://[::1]:80"),
        ("::1", "http://[::1]:80", "http://127.0.0.1"),
        ("localhost:3000", "http://localhost:3000", "http://app.localhost:3000"),
        ("wiki.internal", "https://wiki.internal", "https://evil.wiki.internal"),
        ("10.1.0.0/16", "http://10.1.2.3", "http://10.2.0.1"),
        ("fd00:1::/32", "http://[fd00:1::5]", "http://[fd00:2::5]"),
        ("Wiki.Internal:80", "http://wiki.internal", "https://wiki.internal"),
    ],
)
def test_allow_list_opens_exactly_what_it_names(entry: str, allowed: str, refused: str) -> None:
    policy = AddressPolicy([entry])
    policy.check_url(allowed)
    with pytest.raises(AddressBlockedError):
        policy.check_url(refused)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1"])
def test_allowed_address_in_an_odd_spelling_stays_refused(host: str) -> None:
    with pytest.raises(AddressBlockedError):
        AddressPolicy(["127.0.0.1:8000"]).check_url(f"http://{host}:8000")


def test_allowed_name_may_lead_to_private_addresses_but_never_to_metadata() -> None:
    policy = AddressPolicy(["wiki.internal"])
    target = policy.check_url("http://wiki.internal")
    for address in ("10.0.0.7", "127.0.0.1", "fd12::1"):
        assert policy.check_address(address, target) == ip_address(address)
    for address in ("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "::", "fe80::1"):
        with pytest.raises(AddressBlockedError):
            policy.check_address(address, target)


def test_allowed_host_opens_its_address_to_no_other_name() -> None:
    policy = AddressPolicy(["127.0.0.1:8000", "wiki.internal"])
    target = policy.check_url("http://rebound.example.com:8000")
    with pytest.raises(AddressBlockedError):
        policy.check_address("127.0.0.1", target)


def test_allowed_block_is_open_under_public_names() -> None:
    policy = AddressPolicy(["10.1.0.0/16"])
    target = policy.check_url("http://wiki.example.com")
    policy.check_address("10.1.2.3", target)
    with pytest.raises(AddressBlockedError):
        policy.check_address("10.2.2.3", target)


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.internal", "http://wiki.internal", "10.1.2.3/8", "a b", "x:99999x", "127.1"],
)
def test_unusable_allow_entry_names_itself_and_the_fix(entry: str) -> None:
    with pytest.raises(InputError, match="is not a valid entry") as caught:
        AddressPolicy([entry])
    assert repr(entry) in caught.value.problem


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_what_python_calls_not_global_is_refused(address: IPv4Address) -> None:
    if not address.is_global or address.is_multicast:
        assert non_public_reason(address) is not None


@given(st.integers(0, 2**128 - 1).map(IPv6Address))
def test_what_python_calls_not_global_is_refused_for_ipv6(address: IPv6Address) -> None:
    if not address.is_global or address.is_multicast:
        assert non_public_reason(address) is not None


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{:d}", "{:#x}", "0{:o}", "{:#X}"]))
def test_an_address_as_one_number_is_refused(number: int, spelling: str) -> None:
    with pytest.raises(AddressBlockedError):
        PUBLIC.check_url(f"http://{spelling.format(number)}/")


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_ipv4_in_ipv6_is_refused_whatever_it_holds(address: IPv4Address) -> None:
    low = int(address)
    for prefix in ("::", "::ffff:0:0", "64:ff9b::", "64:ff9b:1::", "::ffff:0:0:0"):
        assert non_public_reason(IPv6Address(int(IPv6Address(prefix)) | low)) is not None
    assert non_public_reason(IPv6Address((0x2002 << 112) | (low << 80))) is not None


@given(st.text(max_size=40))
def test_any_text_is_a_target_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"https://{text}:443/"):
        try:
            target = PUBLIC.check_url(url)
        except AddressBlockedError:
            continue
        assert target.host.isascii()
        assert target.address is None or non_public_reason(target.address) is None
