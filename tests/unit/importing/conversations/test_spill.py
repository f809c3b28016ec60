from stillroom.importing.spill import Spill


def test_pieces_come_back_whether_they_are_written_or_wait(tmp_path):
    pieces = [bytes([number]) * number for number in range(1, 20)]
    with Spill(tmp_path) as spill:
        locations = []
        for number, piece in enumerate(pieces):
            locations.append(spill.append(piece))
            if number % 5 == 0:
                assert spill.read(locations[number // 2], number // 2 + 1) == pieces[number // 2]
        found = [
            spill.read(location, len(piece))
            for location, piece in zip(locations, pieces, strict=True)
        ]
        assert found == pieces
        assert list(tmp_path.iterdir()) == []
