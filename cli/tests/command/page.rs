//! What docs/command.md shows is what the command prints, except for times and numbers.

use std::path::Path;

use syncguard::{LockOptions, PgLockClient};

use crate::Done;
use crate::program::SYNCGUARD;
use crate::support;

/// A session as the page shows it: what is typed, and what comes of it.
fn sessions(page: &str) -> Vec<Vec<(&str, String)>> {
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("text\n"));
    blocks.map(session_of).filter(|session| !session.is_empty()).collect()
}

fn session_of(block: &str) -> Vec<(&str, String)> {
    let mut session: Vec<(&str, String)> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), session.last_mut()) {
            (Some(typed), _) => session.push((typed, String::new())),
            (None, Some((_, printed))) => printed.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    session
}

/// The words, with one sign for whatever begins with a digit: times, ages.
fn shape(text: &str) -> String {
    let sign = |word: &str| {
        let shown = if word.starts_with(|c: char| c.is_ascii_digit()) { "#" } else { word };
        shown.to_owned()
    };
    text.split_whitespace().map(sign).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_shows_what_is_printed() -> Done {
    let page = include_str!("../../../docs/command.md");
    let found = sessions(page);
    // The page's first session is about a deploy that runs for the second time, the next about one that says who runs
    // it, the last about a stuck key.
    let held = [("deploy", 1, false), ("deploy", 0, true), ("stuck", 0, false)];
    assert_eq!(found.len(), held.len(), "{found:?}");
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let owned = PgLockClient::builder().owner("ci-17").connect(&schema.url())?;
    let mut path = Path::new(SYNCGUARD).parent().expect("a folder").as_os_str().to_owned();
    path.push(":/usr/bin:/bin");
    for ((key, before, says), session) in held.into_iter().zip(found) {
        for _ in 0..before {
            client.lock(key)?.release()?;
        }
        let _held = if says {
            owned.lock_with(key, &LockOptions::new().note("release 4.2"))?
        } else {
            client.lock(key)?
        };
        for (typed, printed) in session {
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-c", &format!("exec 2>&1\n{typed}")]).env("PATH", &path);
            let output = output.env("SYNCGUARD_URL", schema.url()).output()?;
            let output = String::from_utf8(output.stdout)?;
            assert_eq!(
                shape(&output),
                shape(&printed),
                "{typed} prints\n{output}and the page says\n{printed}"
            );
        }
    }
    Ok(())
}
