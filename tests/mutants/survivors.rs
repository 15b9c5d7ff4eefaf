//! The mutants that no test kills, each with the reason: `tests/mutants/survivors.tsv`.

/// Statement, part, which one of several, and why it does no harm or is not seen here.
const TABLE: &str = include_str!("survivors.tsv");

/// The reason of the mutant whose [`Display`](crate::mutant::Mutant) is this.
pub fn reason(mutant: &str) -> Option<&'static str> {
    TABLE.lines().find_map(|line| line.strip_prefix(mutant)?.strip_prefix('\t'))
}

#[test]
fn every_survivor_has_a_reason_of_a_known_kind() {
    for line in TABLE.lines() {
        let columns: Vec<_> = line.split('\t').collect();
        assert_eq!(columns.len(), 4, "{line}");
        let kinds = ["equivalent: ", "costs time: ", "shown elsewhere: ", "second safeguard: "];
        assert!(kinds.iter().any(|kind| columns[3].starts_with(kind)), "{line}");
    }
    let mut lines: Vec<_> = TABLE.lines().collect();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines, TABLE.lines().collect::<Vec<_>>(), "sorted, and each once");
}
