//! One mutant after the other, and what came of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use syncguard::{AcquireResult, PgLockClient};

use crate::mutant::{Mutant, mutants};
use crate::support::sql::Said;
use crate::support::{self, Config, Proxy, Server};
use crate::survivors;
use crate::tests::{Ended, Known, Program, is_first, learn};

/// The tests of one mutant take no longer than this together, as they took without one: in seconds.
fn most_time() -> Duration {
    let seconds = env::var("SYNCGUARD_MUTANTS_TIME").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(40))
}

/// What became of a mutant.
enum Fate {
    KilledBy(String),
    Survived,
    /// No test calls the statement.
    NotCalled,
}

#[test]
fn the_statements_without_their_parts_are_noticed() {
    let Ok(path) = env::var("SYNCGUARD_MUTANTS_PROGRAM") else { return control() };
    let directory = env::var("SYNCGUARD_MUTANTS_DIR").expect("scripts/mutants says where the results go");
    let only = env::var("SYNCGUARD_MUTANTS_ONLY").unwrap_or_default();
    let server = Server::start(&Config::new().set("max_connections", "300"));
    let program = Program { path, histories: 100 };
    let before = format!("{directory}/known.tsv");
    let known = fs::read_to_string(&before).map_or_else(
        |_| {
            let files = env::var("SYNCGUARD_MUTANTS_FILES").unwrap_or_default();
            let known = learn(&program, &server, &program.names(&files));
            fs::write(&before, known.write()).expect("the directory is there");
            known
        },
        |text| Known::read(&text),
    );
    println!("{} tests, {} mutants; not used: {:#?}", known.tests.len(), known.mutants.len(), known.unused);
    let is_own = |mutant: &&Mutant| !mutant.elsewhere().any(|there| known.mutants.contains(&there));
    let place = |mutant: &Mutant| only.split(',').position(|name| mutant.to_string().starts_with(name));
    // Who was killed in an earlier run of the same program stays so.
    let results = format!("{directory}/sql.tsv");
    let earlier = fs::read_to_string(&results).unwrap_or_default();
    let killer = |mutant: &Mutant| {
        let name = mutant.to_string();
        let mut killed = earlier.lines().filter_map(|line| line.strip_prefix("killed by ")?.split_once('\t'));
        killed.find(|(_, killed)| *killed == name).map(|(test, _)| test.to_owned())
    };
    let mut fates: BTreeMap<Mutant, Fate> = BTreeMap::new();
    for mutant in known.mutants.iter().filter(is_own) {
        fates.extend(killer(mutant).map(|test| (mutant.clone(), Fate::KilledBy(test))));
    }
    let mut wanted: Vec<&Mutant> =
        known.mutants.iter().filter(|mutant| place(mutant).is_some()).filter(is_own).collect();
    wanted.retain(|mutant| !fates.contains_key(*mutant));
    // In the order that was asked for, and first what is not known yet.
    wanted.sort_by_key(|mutant| (survivors::reason(&mutant.to_string()).is_some(), place(mutant)));
    println!("{} parts to take out", wanted.len());
    let (next, fates) = (Mutex::new(wanted.iter()), Mutex::new(fates));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(mutant) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        return;
                    };
                    let fate = fate(&program, &server, &known, mutant);
                    println!("{}\t{mutant}", word(&fate, mutant));
                    let mut fates = fates.lock().unwrap_or_else(PoisonError::into_inner);
                    fates.insert((*mutant).clone(), fate);
                    fs::write(&results, list(&fates)).expect("the directory is there");
                }
            });
        }
    });
    let fates = fates.into_inner().unwrap_or_else(PoisonError::into_inner);
    fs::write(format!("{directory}/sql.md"), table(&fates)).expect("the directory is there");
    let open = fates.iter().filter(|(mutant, fate)| {
        !matches!(fate, Fate::KilledBy(_)) && survivors::reason(&mutant.to_string()).is_none()
    });
    assert_eq!(open.count(), 0, "mutants that no test kills, without a reason");
}

/// One statement's mutants, by a test that is written out here.
fn control() {
    let schema = support::schema();
    let direct = PgLockClient::connect(&schema.url()).unwrap();
    let ttl = Duration::from_secs(60);
    let alive = "true for l.lock_id (=) $1";
    for (part, found) in [("", "NotHeld"), (alive, "Released")] {
        let proxy = Proxy::start(support::server().port());
        let mutant = Mutant { statement: "release_live".to_owned(), part: part.to_owned(), nth: 0 };
        proxy.rewrite(move |said| mutant.text(said));
        let client = PgLockClient::connect(&proxy.url(&schema.url())).unwrap();
        let AcquireResult::Acquired(held) = direct.acquire("k", ttl).unwrap() else { panic!("it is free") };
        let stranger = "AAAAAAAAAAAAAAAAAAAAAA";
        assert_eq!(format!("{:?}", client.release(stranger).unwrap()), found, "{part}");
        let _ = direct.release(&held.lock_id).unwrap();
    }
    let text = "DELETE FROM t AS l WHERE l.lock_id OPERATOR(pg_catalog.=) $1 AND l.x";
    assert!(mutants(Said { name: "release_live", text }).iter().any(|mutant| mutant.part == alive));
}

/// The tests that call the statement, those of the protocol first, until one fails.
fn fate(program: &Program, server: &Server, known: &Known, mutant: &Mutant) -> Fate {
    let callers = known.tests.iter().filter(|(_, (_, called))| called.iter().any(|name| mutant.is_in(name)));
    // As many of them as the time is enough for.
    let mut callers: Vec<_> =
        callers.map(|(name, (time, _))| (!is_first(name), *time, name.as_str())).collect();
    if callers.is_empty() {
        return Fate::NotCalled;
    }
    callers.sort_unstable();
    let proxy = Proxy::start(server.port());
    let there = mutant.clone();
    proxy.rewrite(move |said| there.text(said));
    let (mut batch, mut expected, mut sum) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    let mut batches = Vec::new();
    for (_, time, name) in callers {
        sum += time;
        if sum > most_time() {
            break;
        }
        batch.push(name);
        expected += time;
        if batch.len() >= 8 << (2 * batches.len().min(3)) {
            batches.push((std::mem::take(&mut batch), std::mem::take(&mut expected)));
        }
    }
    batches.push((batch, expected));
    for (mut batch, expected) in batches {
        while !batch.is_empty() {
            let limit = Duration::from_secs(20) + 2 * expected;
            let start = Instant::now();
            match program.run(server, &proxy, &batch, limit) {
                Ended::Passed => break,
                Ended::TooLate => return Fate::KilledBy(format!("no end after {:.0?}", start.elapsed())),
                // Once more alone: it may have failed for another reason.
                Ended::Failed(name) => match program.run(server, &proxy, &[&name], limit) {
                    Ended::Passed => batch.retain(|test| *test != name),
                    _ => return Fate::KilledBy(name),
                },
            }
        }
    }
    Fate::Survived
}

fn word(fate: &Fate, mutant: &Mutant) -> String {
    match (fate, survivors::reason(&mutant.to_string())) {
        (Fate::KilledBy(test), _) => format!("killed by {test}"),
        (_, Some(reason)) => format!("survived, {reason}"),
        (Fate::Survived, None) => "SURVIVED".to_owned(),
        (Fate::NotCalled, None) => "NOT CALLED".to_owned(),
    }
}

/// A line per mutant.
fn list(fates: &BTreeMap<Mutant, Fate>) -> String {
    let lines: Vec<_> =
        fates.iter().map(|(mutant, fate)| format!("{}\t{mutant}\n", word(fate, mutant))).collect();
    lines.concat()
}

/// Per statement: how many mutants, how many are killed, how many have a reason.
fn table(fates: &BTreeMap<Mutant, Fate>) -> String {
    let mut rows: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for (mutant, fate) in fates {
        let row = rows.entry(&mutant.statement).or_default();
        row[0] += 1;
        row[1] += usize::from(matches!(fate, Fate::KilledBy(_)));
        row[2] += usize::from(word(fate, mutant).starts_with("survived, "));
    }
    let mut out = String::from(
        "| statement | mutants | killed | survived, with a reason | open |\n| --- | ---: | ---: | ---: | ---: |\n",
    );
    let mut sums = [0; 3];
    for (statement, row) in &rows {
        let [all, killed, explained] = row;
        let _ = writeln!(
            out,
            "| `{statement}` | {all} | {killed} | {explained} | {} |",
            all - killed - explained
        );
        (0..3).for_each(|n| sums[n] += row[n]);
    }
    let [all, killed, explained] = sums;
    let _ = writeln!(
        out,
        "| **all** | **{all}** | **{killed}** | **{explained}** | **{}** |",
        all - killed - explained
    );
    out
}
