//! What a storm did, as a table to print, and to put into the documentation.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::checker::{Violation, took};
use crate::history::{History, MS, Op, Outcome, What};
use crate::storm::{Report, Setup};
use crate::weather::{ALL, Fault};

/// The table stands between these two lines of the file that `SYNCGUARD_FAULT_TABLE` names.
const MARKS: [&str; 2] = ["<!-- storm: written by the command below -->", "<!-- /storm -->"];

/// The operations that were under way while a fault was there.
#[derive(Default)]
struct Line {
    operations: u64,
    refused: u64,
    failed: u64,
    /// Acquires: in the table right afterwards, not in it, nobody could look.
    acquires: [u64; 3],
    extends: u64,
    releases: u64,
    writes: u64,
    /// How long the call took that went farthest beyond its bound, and its bound, in milliseconds.
    longest: Option<(u64, u64)>,
    violations: u64,
}

impl Line {
    fn count(&mut self, op: &Op) {
        self.operations += 1;
        match (&op.outcome, &op.what) {
            (Outcome::Refused, _) => self.refused += 1,
            (Outcome::Failed(_), _) => self.failed += 1,
            (Outcome::Unknown(Some(true)), What::Acquire) => self.acquires[0] += 1,
            (Outcome::Unknown(Some(false)), What::Acquire) => self.acquires[1] += 1,
            (Outcome::Unknown(_), What::Acquire) => self.acquires[2] += 1,
            (Outcome::Unknown(_), What::Extend) => self.extends += 1,
            (Outcome::Unknown(_), What::Release) => self.releases += 1,
            (Outcome::Unknown(_), What::Write) => self.writes += 1,
            (Outcome::Ok { .. } | Outcome::Pending, _) => {}
        }
    }

    fn time(&mut self, took: u64, bound: u64) {
        let beyond = |(took, bound): (u64, u64)| took.cast_signed() - bound.cast_signed();
        let this = (took / MS, bound / MS);
        if self.longest.is_none_or(|longest| beyond(longest) < beyond(this)) {
            self.longest = Some(this);
        }
    }

    fn print(&self, name: &str, injected: u64, out: &mut String) {
        let Self { operations, refused, failed, acquires, extends, releases, writes, violations, .. } = self;
        let [there, not, unasked] = acquires;
        let longest = self.longest.map_or_else(String::new, |(took, bound)| format!("{took} of {bound} ms"));
        let _ = writeln!(
            out,
            "| {name} | {injected} | {operations} | {refused} | {failed} | {there} / {not} / {unasked} | {extends} / {releases} / {writes} | {longest} | {violations} |"
        );
    }
}

/// One line per fault.
pub fn table(
    history: &History,
    windows: &[(Fault, u64, u64)],
    violations: &[Violation],
    (messages, bound): (&BTreeMap<&'static str, u64>, u64),
) -> String {
    let at = |time: u64| {
        let end = windows.partition_point(|(_, from, _)| *from <= time);
        end.checked_sub(1).map(|at| &windows[at]).filter(|(_, _, to)| time <= *to)
    };
    let mut lines: BTreeMap<&str, Line> = BTreeMap::new();
    for op in &history.ops {
        let window = at(op.send).or_else(|| at(op.recv));
        let line = lines.entry(window.map_or("(calm)", |(fault, ..)| fault.name())).or_default();
        line.count(op);
        if let Some(took) = took(history, op).filter(|_| op.bound > 0) {
            line.time(took, op.bound);
        }
    }
    for violation in violations {
        let name = at(violation.at).map_or("(calm)", |(fault, ..)| fault.name());
        lines.entry(name).or_default().violations += 1;
    }
    let mut out = String::from(
        "| fault | injected | operations | refused | failed | unknown acquires: row there / not / nobody could look | unknown extends / releases / writes | longest call of its bound | violations |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for name in ALL.iter().map(|fault| fault.name()).chain(["answers later than ttl and tolerance", "(calm)"])
    {
        let injected = windows.iter().filter(|(fault, ..)| fault.name() == name).count();
        if let Some(line) = lines.get(name) {
            line.print(name, injected as u64, &mut out);
        }
    }
    let messages: Vec<String> = messages.iter().map(|(what, n)| format!("{what}: {n}")).collect();
    let late =
        history.ops.iter().filter(|op| op.what == What::Write && op.outcome == Outcome::Refused).count();
    let _ = write!(
        out,
        "\nSingle messages: {}. Calls by the driver's own prepared statements: {bound}.\nWrites of holders that came too late, refused by their fence: {late}. Pauses of processes: {}.\n",
        messages.join(", "),
        history.pauses.len()
    );
    out
}

/// Prints it, and writes it into a file if the environment names one.
pub fn publish(setup: &Setup<'_>, report: &Report) {
    let (major, minor) = crate::support::binaries::binaries().version;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "PostgreSQL {major}.{minor}, {cores} cores, {} seconds, seed {}, {} processes of 3 threads: {} operations, {} violations.\n\n{}",
        setup.seconds,
        setup.seed,
        setup.sabotage.len(),
        report.history.ops.len(),
        report.violations.len(),
        report.table
    );
    println!("{text}");
    let Ok(path) = std::env::var("SYNCGUARD_FAULT_TABLE") else { return };
    let page = std::fs::read_to_string(&path).expect("SYNCGUARD_FAULT_TABLE names a file");
    let page = between(&page, &text).expect("the file has both marks, in order");
    std::fs::write(&path, page).expect("the file can be written");
}

/// The page with this text between its marks.
fn between(page: &str, text: &str) -> Option<String> {
    let (before, rest) = page.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{}\n{text}{}{after}", MARKS[0], MARKS[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_keeps_all_but_what_is_between_its_marks() {
        let page = format!("a\n{}\nold\n{}\nb\n", MARKS[0], MARKS[1]);
        let expected = format!("a\n{}\nnew\n{}\nb\n", MARKS[0], MARKS[1]);
        assert_eq!(between(&page, "new\n"), Some(expected));
        assert_eq!(between("no marks", "new\n"), None);
    }
}
