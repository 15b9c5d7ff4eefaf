//! The house rules that a compiler does not check: who may use whom, and what must not be there.
//!
//! Every rule is a function from a source to the places that break it, and each is tried on a
//! source that does.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::path::Path;
use std::{fs, iter};

use crate::source::{Source, Token, read_all};

/// A module imports only from modules with a lower number. A new top-level module needs a line here.
const FLOORS: [(&str, u8); 16] = [
    ("client", 8),
    ("lock", 7),
    ("advisory", 7),
    ("diagnostics", 7),
    ("leases", 6),
    ("memory", 6),
    ("telemetry", 6),
    ("pg", 5),
    ("backend", 4),
    ("tls", 4),
    ("cancel", 3),
    ("waiting", 3),
    ("model", 2),
    ("error", 1),
    ("threads", 1),
    ("sync", 0),
];

/// Not even where the floors allow it.
const NEVER: [(&str, &str); 3] = [("lock", "leases"), ("lock", "pg"), ("advisory", "leases")];

const DRIVERS: [&str; 5] = ["postgres", "tokio_postgres", "postgres_protocol", "r2d2", "r2d2_postgres"];

/// The modules that may name the driver.
const MAY_NAME_DRIVERS: [&str; 5] = ["pg", "tls", "leases", "advisory", "client"];

/// The one `static`: where a monotonic clock that has no origin of its own starts to count.
const STATICS: [(&str, &str); 1] = [("src/model/time.rs", "START")];

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Applies a rule to the whole of src/.
#[track_caller]
fn check(rule: impl Fn(&Source) -> Vec<String>) {
    let sources = read_all(top(), "src");
    assert!(sources.iter().any(|source| source.file == "src/lib.rs"), "src/ was not found");
    let broken: Vec<String> = sources.iter().flat_map(rule).collect();
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

/// How often a rule finds something in this text.
fn count(rule: impl Fn(&Source) -> Vec<String>, file: &str, text: &str) -> usize {
    rule(&Source::parse(file, text).expect("the sample is Rust")).len()
}

fn at(source: &Source, line: usize, what: &str) -> String {
    format!("{}:{line}: {what}", source.file)
}

fn each<'a>(source: &Source, tokens: impl Iterator<Item = &'a Token>, what: &str) -> Vec<String> {
    tokens.map(|token| at(source, token.line, &format!("`{}`: {what}", token.text))).collect()
}

fn floor(module: &str) -> Option<u8> {
    FLOORS.iter().find(|(name, _)| *name == module).map(|(_, floor)| *floor)
}

/// The name behind `crate::`, also when it is reached by way of `super::`; none for a path that
/// begins elsewhere.
fn from_the_top(source: &Source, names: &[String]) -> Option<String> {
    let ups = names.iter().take_while(|name| *name == "super").count();
    let (base, rest) = match names.first().map(String::as_str)? {
        "crate" => (Vec::new(), names.get(1..)?),
        "self" => (source.module.clone(), names.get(1..)?),
        "super" => {
            let keep = source.module.len().checked_sub(ups)?;
            (source.module.get(..keep)?.to_vec(), names.get(ups..)?)
        }
        _ => return None,
    };
    base.iter().chain(rest).next().cloned()
}

fn arrows(source: &Source) -> Vec<String> {
    let here = source.top();
    // lib.rs has everything below it.
    if here.is_empty() {
        return Vec::new();
    }
    let Some(own) = floor(here) else {
        return vec![format!(
            "{}: the module `{here}` has no place in the house: give it one in FLOORS",
            source.file
        )];
    };
    let mut broken = Vec::new();
    for path in source.paths() {
        let Some(target) = from_the_top(source, &path.names).filter(|target| target != here) else {
            continue;
        };
        let name = path.names.join("::");
        match floor(&target) {
            None => {
                broken.push(at(source, path.line, &format!("`{name}` comes from lib.rs: name its module")));
            }
            Some(_) if NEVER.contains(&(here, target.as_str())) => {
                broken.push(at(source, path.line, &format!("`{here}` must not use `{target}` (`{name}`)")));
            }
            Some(other) if other >= own => {
                broken.push(at(source, path.line, &format!("`{target}` is not below `{here}` (`{name}`)")));
            }
            Some(_) => {}
        }
    }
    broken
}

#[test]
fn modules_import_only_from_below() {
    check(arrows);
}

#[test]
fn an_arrow_that_points_up_is_found() {
    let broken = [
        "use crate::client::PgLockClient;",
        "fn f() { crate::client::go() }",
        "fn f() { assert!(crate::client::go()); }",
        "use super::client::PgLockClient;",
        "use crate::{error::Result, telemetry::X as Y};",
        "use crate::{error::{self, Result}, lock};",
        "pub(crate) use crate::pg::*;",
        "use crate::LockError;",
        "use super::*;",
        "use crate::unheard_of::X;",
        "#[cfg(feature = \"x\")] use crate::client::X;",
        "#[cfg(test)] mod tests { } use crate::client::X;",
    ];
    for text in broken {
        assert_eq!(count(arrows, "src/backend.rs", text), 1, "{text}");
    }
    let fine = [
        "use crate::model::{fence::Fence, time::Clock};",
        "/// [`x`](crate::client::X)\nfn f() {}",
        "//! [`x`](crate::client::X)",
        "// crate::client::X",
        "const X: &str = \"crate::client::X\";",
        "#[cfg(test)]\nmod tests { use crate::client::X; use super::*; }",
        "#[cfg(test)] use crate::{client, lock};",
        "pub(crate) fn f(x: client::X) {}",
    ];
    for text in fine {
        assert_eq!(count(arrows, "src/backend.rs", text), 0, "{text}");
    }
    assert_eq!(
        count(arrows, "src/lock/guard.rs", "use super::super::advisory::X; use super::lease::Lease;"),
        1
    );
    assert_eq!(
        count(arrows, "src/lock/mod.rs", "use crate::pg::X; use self::guard::G; use super::cancel::C;"),
        1
    );
    assert_eq!(count(arrows, "src/client.rs", "use crate::{pg::X, lock::Y, error::Z};"), 0);
    assert_eq!(count(arrows, "src/lib.rs", "pub use crate::client::PgLockClient;"), 0);
    assert_eq!(count(arrows, "src/novelty.rs", ""), 1);
}

/// Rooms in which no file uses a file that uses it, by whatever detour. A new room belongs here. (In `client/` and
/// `memory/` one type has its methods in several files.)
const WITHOUT_CIRCLES: [&str; 10] =
    ["tls", "lock", "advisory", "leases", "telemetry", "pg", "backend", "waiting", "cancel", "model"];

/// Which files of its own room a file names: their modules.
fn neighbours<'a>(source: &Source, room: &'a [Source]) -> Vec<&'a Source> {
    let mut found = Vec::new();
    // `self` and `pub(super)` are no paths.
    for path in source.paths().into_iter().filter(|path| path.names.len() > 1) {
        let ups = path.names.iter().take_while(|name| *name == "super").count();
        let (base, rest) = match path.names.first().map_or("", String::as_str) {
            "crate" => (&[][..], &path.names[1..]),
            "super" => (&source.module[..source.module.len().saturating_sub(ups)], &path.names[ups..]),
            "self" => (&source.module[..], &path.names[1..]),
            // A file's own submodules need no prefix.
            _ => (&source.module[..], &path.names[..]),
        };
        let whole: Vec<&String> = base.iter().chain(rest).collect();
        let named = room.iter().filter(|other| {
            whole.len() >= other.module.len()
                && other.module.iter().eq(whole.iter().copied().take(other.module.len()))
        });
        found.extend(named.max_by_key(|other| other.module.len()).filter(|other| other.file != source.file));
    }
    found
}

/// A way from a file back to it, over files of its room.
fn circles(sources: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for first in sources {
        let mut ways = vec![vec![first]];
        let mut seen = Vec::new();
        while let Some(way) = ways.pop() {
            for next in way.last().map(|last| neighbours(last, sources)).unwrap_or_default() {
                if next.file == first.file {
                    let names: Vec<_> =
                        way.iter().chain([&next]).map(|source| source.file.as_str()).collect();
                    broken.push(names.join(" -> "));
                } else if !seen.contains(&next.file) {
                    seen.push(next.file.clone());
                    ways.push(way.iter().copied().chain([next]).collect());
                }
            }
        }
    }
    broken
}

#[test]
fn no_file_uses_a_file_of_its_room_that_uses_it() {
    let mut sources = read_all(top(), "src");
    let is_test = |source: &Source| source.module.iter().any(|name| name.contains("tests"));
    sources.retain(|source| WITHOUT_CIRCLES.contains(&source.top()) && !is_test(source));
    assert!(WITHOUT_CIRCLES.iter().all(|room| sources.iter().any(|source| source.top() == *room)));
    assert_eq!(circles(&sources), Vec::<String>::new());

    let room = |texts: [(&str, &str); 3]| {
        texts.map(|(file, text)| Source::parse(file, text).expect("the sample is Rust"))
    };
    let (a, b, c) = ("src/r/a.rs", "src/r/b.rs", "src/r/c.rs");
    assert_eq!(circles(&room([(a, "use crate::r::b::B;"), (b, "use super::c::C;"), (c, "")])).len(), 0);
    let round = [(a, "use crate::r::{b::B, x};"), (b, "use super::c::C;"), (c, "fn f() { super::a::g() }")];
    assert_eq!(circles(&room(round)).len(), 3, "one for each file");
    let parent =
        [("src/r/mod.rs", "mod a; use a::A; struct R;"), (a, "use crate::r::R;"), (b, "use crate::r::a::A;")];
    assert_eq!(circles(&room(parent)).len(), 2);
}

fn drivers(source: &Source) -> Vec<String> {
    if MAY_NAME_DRIVERS.contains(&source.top()) {
        return Vec::new();
    }
    let names_driver = |path: &crate::source::NamePath| {
        let first = path.names.first().map_or("", String::as_str);
        path.names.len() > 1 && DRIVERS.contains(&first)
    };
    let broken = source.paths().into_iter().filter(names_driver);
    let rule = format!("the driver is named in {MAY_NAME_DRIVERS:?} only");
    broken.map(|path| at(source, path.line, &format!("`{}`: {rule}", path.names.join("::")))).collect()
}

#[test]
fn the_driver_is_named_by_the_adapter_only() {
    check(drivers);
}

#[test]
fn a_name_of_the_driver_is_found() {
    let texts = [
        "use postgres::Client;",
        "use ::postgres::Client;",
        "fn f(c: &mut postgres::Client) {}",
        "use {r2d2::Pool, std::fmt};",
        "impl From<tokio_postgres::Error> for E {}",
    ];
    for text in texts {
        assert_eq!(count(drivers, "src/error.rs", text), 1, "{text}");
        assert_eq!(count(drivers, "src/pg/session.rs", text), 0, "{text}");
        assert_eq!(count(drivers, "src/advisory/guard.rs", text), 0, "{text}");
    }
    assert_eq!(count(drivers, "src/error.rs", "let postgres = 1; use crate::pg::X; // r2d2::Pool"), 0);
    assert_eq!(count(drivers, "src/lib.rs", "pub use {postgres, r2d2};"), 0);
}

fn no_unsafe(source: &Source) -> Vec<String> {
    each(source, source.words().filter(|word| word.text == "unsafe"), "this crate has no unsafe code")
}

fn no_globals(source: &Source) -> Vec<String> {
    // It is in no library: whose turn it is, in tests.
    if source.file == "src/sync/simulated.rs" {
        return Vec::new();
    }
    let allowed = |token: &&Token| STATICS.contains(&(source.file.as_str(), token.text.as_str()));
    let statics = source.statics().filter(|token| !allowed(token));
    let mut broken = each(source, statics, "there is no global state; a constant is a `const`");
    broken.extend(each(source, source.followed_by("thread_local", "!"), "there is no global state"));
    broken
}

/// Poison is recovered from in one place, and nothing waits on a lock that a fork leaves broken.
fn no_other_mutexes(source: &Source) -> Vec<String> {
    if source.file.starts_with("src/sync") {
        return Vec::new();
    }
    let locks = ["Mutex", "MutexGuard", "Condvar", "RwLock", "PoisonError"];
    let other = source.paths().into_iter().filter(|path| {
        let names: Vec<&str> = path.names.iter().map(String::as_str).collect();
        names.first() == Some(&"parking_lot")
            || (names.starts_with(&["std", "sync"]) && names.last().is_some_and(|name| locks.contains(name)))
    });
    other.map(|path| at(source, path.line, "take it from `crate::sync`")).collect()
}

fn no_printing(source: &Source) -> Vec<String> {
    let macros = ["println", "print", "eprintln", "eprint", "dbg"].into_iter();
    macros.flat_map(|name| each(source, source.followed_by(name, "!"), "a library logs")).collect()
}

fn no_wall_clock(source: &Source) -> Vec<String> {
    if !["postgres", "lock"].contains(&source.top()) {
        return Vec::new();
    }
    let clocks = source.words().filter(|word| ["SystemTime", "UNIX_EPOCH"].contains(&word.text.as_str()));
    each(source, clocks, "the server's clock judges a lease, a monotonic one its holder")
}

#[test]
fn there_is_no_unsafe_code() {
    check(no_unsafe);
    let manifest = fs::read_to_string(top().join("Cargo.toml")).expect("Cargo.toml is there");
    assert!(manifest.contains("unsafe_code = \"forbid\""));
    assert_eq!(
        count(no_unsafe, "src/error.rs", "fn f() { unsafe { g() } } // unsafe\nconst X: &str = \"unsafe\";"),
        1
    );
}

#[test]
fn there_is_no_global_state() {
    check(no_globals);
    let text = "static A: u8 = 0; static mut B: u8 = 0; thread_local! { static C: u8 = 0; } fn f(x: &'static str) {}";
    assert_eq!(count(no_globals, "src/error.rs", text), 4);
    assert_eq!(
        count(no_globals, "src/error.rs", "const A: &'static str = \"static\"; fn f<T: 'static>(t: T) {}"),
        0
    );
}

#[test]
fn mutexes_come_from_one_place() {
    check(no_other_mutexes);
    let text = "use std::sync::{Arc, Mutex, atomic::AtomicBool}; fn f(g: std::sync::MutexGuard<u8>, m: parking_lot::Mutex<u8>) {}";
    assert_eq!(count(no_other_mutexes, "src/error.rs", text), 3);
    assert_eq!(count(no_other_mutexes, "src/sync.rs", text), 0);
    assert_eq!(count(no_other_mutexes, "src/error.rs", "use crate::sync::Mutex; use std::sync::Arc;"), 0);
}

#[test]
fn nothing_is_printed() {
    check(no_printing);
    assert_eq!(
        count(
            no_printing,
            "src/error.rs",
            "fn f() { println!(\"a\"); std::eprintln!(); dbg!(1); } // println!"
        ),
        3
    );
    assert_eq!(
        count(no_printing, "src/error.rs", "/// ```\n/// println!();\n/// ```\nfn print() { print() }"),
        0
    );
}

#[test]
fn leases_are_not_judged_by_the_wall_clock() {
    check(no_wall_clock);
    assert_eq!(count(no_wall_clock, "src/lock/lease.rs", "fn f() { std::time::SystemTime::now(); }"), 1);
    assert_eq!(count(no_wall_clock, "src/telemetry.rs", "fn f() { std::time::SystemTime::now(); }"), 0);
}

/// Files where what is computed decides which rows are meant.
const IDENTITY_FILES: [&str; 7] = [
    "src/model/key.rs",
    "src/model/lock_id.rs",
    "src/leases/fragments.rs",
    "src/leases/sql.rs",
    "src/leases/held.rs",
    "src/leases/schema.rs",
    "src/advisory/key.rs",
];

/// The display hash collides; it may label something, never identify it.
fn display_hash(source: &Source) -> Vec<String> {
    let careful = IDENTITY_FILES.contains(&source.file.as_str());
    let identifies = |name: &str| {
        name == "owns" || ["storage_key", "fence_key", "advisory_key"].iter().any(|part| name.contains(part))
    };
    let functions = source.functions().into_iter();
    let wrong = functions.filter(|(name, _)| identifies(name) || (careful && *name != "fmt"));
    let uses =
        wrong.filter_map(|(name, body)| Some((name, body.iter().find(|token| token.text == "hash_key")?)));
    uses.map(|(name, token)| {
        at(source, token.line, &format!("`hash_key` in `{name}`: it is a label, no key"))
    })
    .collect()
}

#[test]
fn the_display_hash_identifies_nothing() {
    check(display_hash);
    let label = "use hash::hash_key; impl Debug for K { fn fmt(&self) -> R { write(hash_key(k)) } }";
    assert_eq!(count(display_hash, "src/model/key.rs", label), 0);
    assert_eq!(
        count(display_hash, "src/model/key.rs", "fn digest(k: [u8; 2]) -> [u8; 2] { hash_key(k) }"),
        1
    );
    assert_eq!(
        count(display_hash, "src/diagnostics.rs", "fn get() { hash_key(k) } fn owns() { hash_key(k) }"),
        1
    );
    assert_eq!(count(display_hash, "src/memory.rs", "fn make_fence_key(); fn label() { hash_key(k) }"), 0);
}

/// What SQL text deletes, truncates or drops, if it may be the table of fences.
fn fences_destroyed(sql: &str) -> Vec<String> {
    let mut found = Vec::new();
    for statement in sql.to_lowercase().replace("\\n", " ").split(';') {
        let clean = statement.replace(|c: char| !(c.is_alphanumeric() || "_{}.".contains(c)), " ");
        let words: Vec<&str> =
            clean.split_whitespace().filter(|word| !["only", "if", "exists"].contains(word)).collect();
        for (n, word) in words.iter().enumerate() {
            let rest = words.get(n + 1..).unwrap_or_default();
            let targets = match (*word, rest.first().copied()) {
                ("delete", Some("from")) => rest.get(1..2).unwrap_or_default(),
                ("drop", Some("table" | "schema" | "owned" | "index")) | ("truncate", Some(_)) => rest,
                _ => continue,
            };
            // A placeholder without a name may be anything.
            let bad =
                |target: &&&str| target.contains("fence") || target.contains("{}") || target.contains("{0");
            found.extend(targets.iter().filter(bad).map(|target| format!("{word} … {target}")));
        }
    }
    found
}

fn fences_stay(source: &Source) -> Vec<String> {
    let found =
        source.literals().flat_map(|literal| iter::repeat(literal.line).zip(fences_destroyed(&literal.text)));
    found
        .map(|(line, what)| at(source, line, &format!("`{what}`: a fence counter is never removed")))
        .collect()
}

#[test]
fn no_statement_removes_a_fence_counter() {
    check(fences_stay);
    // Absent until the setup exists; checked from then on.
    let schema = fs::read_to_string(top().join("schema.sql")).unwrap_or_default();
    let statements = schema.lines().map(|line| line.split("--").next().unwrap_or_default());
    let schema = statements.collect::<Vec<_>>().join("\n");
    assert_eq!(fences_destroyed(&schema), Vec::<String>::new());

    let broken = [
        "DELETE FROM \"syncguard_fence_counters\" WHERE true",
        "DELETE FROM ONLY {schema}.{fence_table}",
        "SELECT 1; delete from {} WHERE x",
        "TRUNCATE locks, fences",
        "TRUNCATE TABLE {fences}",
        "DROP TABLE IF EXISTS public.fence_counters",
        "WITH gone AS (DELETE FROM {fences} RETURNING 1) SELECT 1",
    ];
    for sql in broken {
        let code = format!("fn f() {{ run({sql:?}) }}");
        assert_eq!(count(fences_stay, "src/leases/sql.rs", &code), 1, "{sql}");
    }
    let fine = [
        "DELETE FROM {locks} WHERE fence = $1",
        "drop the guard, then the fence",
        "UPDATE fences SET fence = 1",
    ];
    for sql in fine {
        assert_eq!(fences_destroyed(sql), Vec::<String>::new(), "{sql}");
    }
}
