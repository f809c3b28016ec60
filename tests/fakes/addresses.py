"""Spellings of addresses that no page may make the browser reach."""

# By kind, so that a failure names what got through.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "loopback": (
        "127.0.0.1", "127.0.0.2", "127.1.2.3", "127.255.255.254", "0.0.0.0", "0.1.2.3",  # noqa: S104
    ),
    "private": (
        "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.254", "192.168.0.1",
        "192.168.255.254",
    ),
    "link-local and metadata": (
        "169.254.169.254", "169.254.170.2", "169.254.0.1", "100.100.100.200", "192.0.0.192",
        "168.63.129.16", "[fd00:ec2::254]", "[fd20:ce::254]", "metadata.google.internal",
        "metadata", "instance-data",
    ),
    "shared, reserved and multicast": (
        "100.64.0.1", "100.127.255.254", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.19.255.254",
        "198.51.100.7", "203.0.113.7", "224.0.0.1", "239.255.255.250", "240.0.0.1",
        "255.255.255.255",
    ),
    "decimal": ("2130706433", "3232235521", "2852039166", "0", "167772161"),
    "hex": ("0x7f000001", "0x7f.0.0.1", "0x7f.0x0.0x0.0x1", "0xA9FEA9FE", "0x7F.1", "0x0"),
    "octal": (
        "0177.0.0.1", "0177.0.0.01", "017700000001", "00.0.0.0", "0300.0250.0.1", "127.0.0.01",
    ),
    "short": ("127.1", "127.0.1", "10.1", "192.168.1", "0"),
    "trailing dot": ("127.0.0.1.", "localhost.", "2130706433.", "169.254.169.254."),
    "percent-encoded": ("%31%32%37.0.0.1", "127%2e0%2e0%2e1", "%6c%6f%63alhost", "127.0.0.1%00"),
    "other digits and letters": (
        "\uff11\uff12\uff17.\uff10.\uff10.\uff11",  # full-width digits
        "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460",  # circled digits
        "127\u30020\u30020\u30021",  # ideographic full stops
        "127\uff0e0\uff0e0\uff0e1",  # full-width full stops
        "\uff4c\uff4f\uff43\uff41\uff4c\uff48\uff4f\uff53\uff54",  # full-width letters
        "loc\u24d0lhost",  # a circled letter
        "1\u00ad27.0.0.1",  # a soft hyphen
        "loca\u200blhost",  # a zero-width space
    ),
    "IPv6": (
        "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[0000:0000:0000:0000:0000:0000:0000:0001]",
        "[fc00::1]", "[fd12:3456:789a::1]", "[fe80::1]", "[fec0::1]", "[ff02::1]", "[100::1]",
        "[2001:db8::1]", "[3fff::1]", "[5f00::1]", "[2001:10::1]", "[2001:20::1]", "[4000::1]",
    ),
    "IPv4 in IPv6": (
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[::7f00:1]",
        "[::ffff:169.254.169.254]", "[::ffff:0:127.0.0.1]", "[0:0:0:0:0:ffff:10.0.0.1]",
        "[64:ff9b::127.0.0.1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[2001:0:7f00:1::]",
        "[2001:0:4136:e378:8000:63bf:80ff:fffe]", "[2a00:1450::5efe:127.0.0.1]",
    ),
    "IPv6 zones": ("[fe80::1%25lo]", "[fe80::1%lo]", "[::1%25lo]", "[2606:4700::1%25eth0]"),
    "local names": (
        "localhost", "LOCALHOST", "app.localhost", "localhost.localdomain", "printer.local",
        "wiki.internal", "nas.lan", "router.home.arpa", "intranet", "db",
    ),
}  # fmt: skip

FORBIDDEN_HOSTS: tuple[str, ...] = tuple(
    dict.fromkeys(host for hosts in FORBIDDEN.values() for host in hosts)
)

# Two spellings of each kind, for the ways in which a browser takes long over each.
SOME_FORBIDDEN_HOSTS: tuple[str, ...] = tuple(
    dict.fromkeys(host for hosts in FORBIDDEN.values() for host in hosts[:2])
)

# IP addresses that a public name may resolve to in an attack, as a resolver gives them.
FORBIDDEN_ADDRESSES: tuple[str, ...] = (
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.1.1",  # noqa: S104
    "100.64.0.1",
    "169.254.169.254", "168.63.129.16", "192.0.0.1", "198.18.0.1", "224.0.0.251",
    "255.255.255.255", "::1", "::", "::ffff:127.0.0.1", "::7f00:1", "64:ff9b::7f00:1", "fe80::1",
    "fe80::1%lo", "fd00:ec2::254", "2002:7f00:1::", "2001:0:7f00:1::", "ff02::1", "fec0::1",
)  # fmt: skip

PUBLIC_HOSTS: tuple[str, ...] = (
    "example.com", "EXAMPLE.com", "sub.domain.example.org", "xn--mnchen-3ya.de", "m\u00fcnchen.de",
    "8.8.8.8", "1.1.1.1", "[2606:4700:4700::1111]", "1password.com", "0x.org", "a_b.example.com",
    "localhost.example.com", "notlocal.dev", "internal.io", "10.0.0.1.nip.io",
)  # fmt: skip
