//! What the other commands print, and their exit codes.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use syncguard::{LockOptions, PgLockClient};

use crate::Done;
use crate::program::{SYNCGUARD, bare, said, syncguard, told};
use crate::support;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn status_says_whether_a_key_is_held_and_so_does_its_exit_code() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    assert_eq!(said(&schema, &["status", "app:k"]), (1, "app:k is free\n".to_owned(), String::new()));
    let free = json(&said(&schema, &["status", "app:k", "--json"]).1);
    assert_eq!((&free["key"], &free["held"]), (&"app:k".into(), &false.into()));
    let guard = client.lock_with("app:k", &LockOptions::new().ttl(Duration::from_secs(600)))?;
    let (code, out, _) = said(&schema, &["status", "app:k"]);
    assert!(
        code == 0 && out.starts_with("app:k is held for ") && out.contains("under fencing token 1;"),
        "{out}"
    );
    let (code, out, _) = said(&schema, &["--json", "status", "app:k"]);
    let held = json(&out);
    assert_eq!((code, &held["key"], &held["held"]), (0, &"app:k".into(), &true.into()));
    assert_eq!(held["fence"], guard.fence().to_string());
    assert_eq!(held["expires_at_ms"], guard.expires_at_ms());
    assert!(held["acquired_at_ms"].as_i64() < held["expires_at_ms"].as_i64());
    Ok(())
}

#[test]
fn list_shows_all_that_is_held_by_name() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    assert_eq!(said(&schema, &["list"]).1, "nothing is held\n");
    let _held = [client.lock("b")?, client.lock("a\n\u{1b}[2J")?, client.semaphore("c", 3)?.acquire()?];
    let (code, out, err) = said(&schema, &["list"]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, lines.len(), err.as_str()), (0, 4, ""), "{out}");
    assert!(lines[0].starts_with("KEY ") && lines[2].starts_with("b "), "{out}");
    assert!(!out.contains('\u{1b}'), "a key cannot speak to the terminal: {out:?}");
    let all = json(&said(&schema, &["list", "--json"]).1);
    let keys: Vec<_> = all.as_array().expect("an array").iter().map(|lease| lease["key"].as_str()).collect();
    assert_eq!(keys, [Some("a\n\u{1b}[2J"), Some("b"), Some("c")]);
    assert!(all[2]["permit"].as_u64().is_some_and(|permit| (1..=3).contains(&permit)), "{all}");
    assert!(said(&schema, &["list", "--limit", "2"]).2.contains("--limit"));
    Ok(())
}

#[test]
fn whoever_asks_is_told_who_has_a_key_in_the_holder_s_words() -> Done {
    let schema = support::schema();
    let client = PgLockClient::builder().owner("ci-17").connect(&schema.url())?;
    let guard = client.lock_with("k", &LockOptions::new().note("4.2\n\u{1b}[2J\u{202e}"))?;
    let silent = PgLockClient::connect(&schema.url())?.lock("s")?;
    let words = "ci-17 (4.2\\u{a}\\u{1b}[2J\\u{202e})";
    let (code, out, _) = said(&schema, &["status", "k"]);
    assert!(code == 0 && out.starts_with(&format!("k is held by {words} for ")), "{out}");
    let list = said(&schema, &["list"]).1;
    let lines: Vec<&str> = list.lines().collect();
    assert!(lines[0].ends_with("  WHO") && lines[1].ends_with(words) && lines[2].starts_with("s "), "{list}");
    let all = json(&said(&schema, &["list", "--json"]).1);
    assert_eq!(all[0]["owner"], "ci-17");
    assert_eq!(all[0]["note"], "4.2\n\u{1b}[2J\u{202e}");
    assert!(all[1].get("owner").is_none() && all[1].get("note").is_none(), "{all}");
    assert_eq!(json(&said(&schema, &["status", "k", "--json"]).1)["owner"], "ci-17");
    let (code, _, err) = said(&schema, &["run", "--key", "k", "--wait", "0", "--", "true"]);
    assert!(code == 75 && err.contains(&format!("k is held by {words} for ")), "{err}");
    guard.release()?;
    silent.release()?;
    let script = "\"$0\" list --json";
    let program = ["--", "sh", "-c", script, SYNCGUARD];
    let args = ["run", "--key", "k", "--owner", "web-3", "--note", "a test"];
    let own = json(&said(&schema, &[args.as_slice(), program.as_slice()].concat()).1);
    assert_eq!((&own[0]["owner"], &own[0]["note"]), (&"web-3".into(), &"a test".into()));
    let elected = ["elect", "--key", "k", "--note", "leads"];
    let mut command = syncguard(&schema, &[elected.as_slice(), program.as_slice()].concat());
    let own = json(&told(&command.env("SYNCGUARD_OWNER", "web-4").output()?).1);
    assert_eq!((&own[0]["owner"], &own[0]["note"]), (&"web-4".into(), &"leads".into()));
    let long = "x".repeat(1025);
    let (code, _, err) = said(&schema, &["run", "--key", "k", "--note", &long, "--", "true"]);
    assert!(code != 0 && err.contains("the note"), "{code} {err}");
    Ok(())
}

#[test]
fn a_reader_that_goes_away_is_no_failure() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let _held = client.lock("k")?;
    let mut command = syncguard(&schema, &["list"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    drop(child.stdout.take());
    let output = child.wait_with_output()?;
    assert_eq!(told(&output), (0, String::new(), String::new()));
    Ok(())
}

#[test]
fn options_of_the_connection_stand_before_or_after_the_subcommand() -> Done {
    let schema = support::schema();
    PgLockClient::connect(&schema.url())?;
    let url = schema.url();
    for args in
        [["--url", &url, "status", "k"], ["status", "--url", &url, "k"], ["status", "k", "--url", &url]]
    {
        let (code, out, err) = told(&bare().args(args).output()?);
        assert_eq!((code, out.as_str(), err.as_str()), (1, "k is free\n", ""));
    }
    Ok(())
}

#[test]
fn the_address_comes_from_the_first_place_that_has_one() -> Done {
    let schema = support::schema();
    PgLockClient::connect(&schema.url())?;
    let nowhere = "postgresql://x@127.0.0.1:1/x";
    let config = schema.config();
    let host = match &config.get_hosts()[0] {
        syncguard::postgres::config::Host::Tcp(host) => host.clone(),
        other @ syncguard::postgres::config::Host::Unix(_) => panic!("{other:?}"),
    };
    let port = config.get_ports()[0].to_string();
    let options = format!("-c search_path={}", schema.name());
    let variables = [
        ("PGHOST", host.as_str()),
        ("PGPORT", &port),
        ("PGUSER", config.get_user().expect("a user")),
        ("PGDATABASE", config.get_dbname().expect("a database")),
        ("PGOPTIONS", &options),
    ];
    let password = config.get_password().map(|password| String::from_utf8_lossy(password).into_owned());
    let status = |more: &[(&str, &str)]| -> Result<i32, std::io::Error> {
        let mut command = bare();
        command.args(["status", "k"]).envs(variables).envs(more.iter().copied());
        if let Some(password) = &password {
            command.env("PGPASSWORD", password);
        }
        Ok(told(&command.output()?).0)
    };
    assert_eq!(status(&[])?, 1);
    assert_eq!(status(&[("DATABASE_URL", nowhere)])?, 69);
    assert_eq!(status(&[("DATABASE_URL", nowhere), ("SYNCGUARD_URL", &schema.url())])?, 1);
    assert_eq!(status(&[("DATABASE_URL", nowhere), ("SYNCGUARD_URL", "")])?, 69, "empty is not set");
    Ok(())
}

#[test]
fn setup_makes_the_tables_and_looking_does_not() -> Done {
    let schema = support::schema();
    let (code, out, err) = said(&schema, &["status", "k"]);
    assert!(code == 64 && out.is_empty() && err.contains("`syncguard setup`"), "{code} {out} {err}");
    for _ in 0..2 {
        let (code, out, err) = said(&schema, &["setup"]);
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
    }
    assert_eq!(said(&schema, &["status", "k"]).0, 1);
    let ready = json(&said(&schema, &["setup", "--json"]).1);
    assert_eq!(ready["ready"], true);
    // In a schema and tables of one's own.
    let elsewhere = format!("{}_own", schema.name());
    schema.client().batch_execute(&format!("CREATE SCHEMA {elsewhere}"))?;
    let own = ["--schema", &elsewhere, "--table", "jobs", "--fence-table", "job_fences"];
    assert_eq!(said(&schema, &[&["setup"][..], &own].concat()).0, 0);
    let sql = format!("SELECT count(*) FROM {elsewhere}.jobs, {elsewhere}.job_fences");
    assert_eq!(schema.client().query_one(&sql, &[])?.get::<_, i64>(0), 0);
    schema.client().batch_execute(&format!("DROP SCHEMA {elsewhere} CASCADE"))?;
    Ok(())
}

#[test]
fn cleanup_says_how_many_rows_it_deleted() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    for n in 0..5 {
        let _granted = client.acquire(&format!("k{n}"), Duration::from_millis(1))?;
    }
    let held = client.lock("held")?;
    schema.client().execute(
        "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 60000 WHERE user_key <> 'held'",
        &[],
    )?;
    let (code, out, _) = said(&schema, &["cleanup", "--batch", "2", "--json"]);
    assert_eq!((code, json(&out)["deleted"].as_u64()), (0, Some(5)));
    assert_eq!(said(&schema, &["cleanup"]).1, "deleted 0 rows of expired leases\n");
    assert!(held.is_held());
    Ok(())
}

#[test]
fn waiters_shows_who_is_stuck_in_the_server() -> Done {
    let schema = support::schema();
    // A key of its own: the queue of a key is that of the whole database.
    let key = "who is stuck";
    let client = PgLockClient::connect(&schema.url())?;
    let guard = client.lock(key)?;
    guard.release()?;
    assert!(said(&schema, &["waiters", key]).1.starts_with("no session is stuck"));
    assert_eq!(json(&said(&schema, &["waiters", key, "--json"]).1), json("[]"));
    // A transaction in the queue of the key, and one behind it.
    let (mut first, mut second) = (schema.client(), schema.client_named("the second"));
    let queue = format!("SELECT pg_advisory_xact_lock(hashtext('{key}'))");
    first.batch_execute(&format!("BEGIN; {queue}"))?;
    std::thread::scope(|scope| -> Done {
        let waiting = scope.spawn(|| second.batch_execute(&format!("BEGIN; {queue}; COMMIT")));
        support::wait_until_app_waits(&mut schema.client(), "the second");
        let found = json(&said(&schema, &["waiters", key, "--json"]).1);
        let (_, table, _) = said(&schema, &["waiters", key]);
        first.batch_execute("COMMIT")?;
        waiting.join().expect("it does not panic")?;
        assert_eq!(found[0]["application_name"], "the second", "{found}");
        assert!(table.starts_with("PID ") && table.contains("the second"), "{table}");
        Ok(())
    })
}

#[test]
fn waiters_counts_the_clients_that_wait_for_each_key() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let guards = [client.lock("busy")?, client.lock("idle")?, client.semaphore("permits", 1)?.acquire()?];
    assert_eq!(said(&schema, &["waiters"]).1, "nobody waits\n");
    let others = [PgLockClient::connect(&schema.url())?, PgLockClient::connect(&schema.url())?];
    std::thread::scope(|scope| -> Done {
        let mut waiting = Vec::new();
        for other in &others {
            // Two threads of a client are one client that waits.
            for _ in 0..2 {
                waiting.push(scope.spawn(|| other.lock_with("busy", &patient()).map(drop)));
            }
        }
        waiting.push(scope.spawn(|| others[0].semaphore("permits", 1)?.acquire_with(&patient()).map(drop)));
        let mut found = Value::Null;
        let expected = json(r#"[{"key":"busy","clients":2},{"key":"permits","clients":1}]"#);
        let all = support::wait::poll(support::LIMIT, || {
            found = json(&said(&schema, &["waiters", "--json"]).1);
            found == expected
        });
        let table = said(&schema, &["waiters"]).1;
        for guard in guards {
            guard.release()?;
        }
        for thread in waiting {
            thread.join().expect("it does not panic")?;
        }
        assert!(all, "{found}");
        assert_eq!(table, "KEY      CLIENTS THAT WAIT\nbusy     2\npermits  1\n");
        Ok(())
    })
}

#[test]
fn waiters_shows_those_in_order_and_run_stands_in_it() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let guard = client.lock_with("till", &LockOptions::new().fair(true))?;
    assert_eq!(said(&schema, &["waiters", "--fair"]).1, "nobody waits in order\n");
    let (code, _, err) = said(&schema, &["run", "-k", "till", "--priority", "1", "--", "true"]);
    assert!(code == 64 && err.contains("--fair"), "{code} {err}");
    let other = PgLockClient::connect(&schema.url())?;
    let urgent = ["run", "-k", "till", "--fair", "--priority", "3", "--", "true"];
    std::thread::scope(|scope| -> Done {
        let thread = scope.spawn(|| other.lock_with("till", &patient().fair(true).priority(-7)).map(drop));
        let command = scope.spawn(|| said(&schema, &urgent).0);
        let mut found = Value::Null;
        let mut table = String::new();
        let both = support::wait::poll(support::LIMIT, || {
            found = json(&said(&schema, &["waiters", "--fair", "--json"]).1);
            table = said(&schema, &["waiters", "--fair"]).1;
            found.as_array().is_some_and(|all| all.len() == 2) && table.lines().count() == 3
        });
        guard.release()?;
        thread.join().expect("it does not panic")?;
        assert_eq!(command.join().expect("it does not panic"), 0);
        assert!(both, "{found}");
        let shown = |at: usize| (found[at]["key"].as_str(), found[at]["priority"].as_i64());
        assert_eq!([shown(0), shown(1)], [(Some("till"), Some(3)), (Some("till"), Some(-7))]);
        assert!(table.starts_with("KEY ") && table.contains("PRIORITY") && table.contains("-7"), "{table}");
        Ok(())
    })
}

fn patient() -> LockOptions {
    LockOptions::new().timeout(Duration::from_secs(60))
}

#[test]
fn break_takes_away_what_was_seen_and_nothing_newer() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    client.lock("k")?.release()?;
    let guard = client.lock("k")?;
    let (code, out, err) = said(&schema, &["break", "k", "--fence", "1"]);
    assert!(
        code == 75 && out.is_empty() && err.contains("not held under fencing token 1"),
        "{code} {out} {err}"
    );
    assert_eq!(said(&schema, &["status", "k"]).0, 0, "the newer holder has it still");
    let (code, out, err) = said(&schema, &["break", "k", "--fence", "2"]);
    assert!(code == 0 && out.contains("the fencing token is 3 now") && err.is_empty(), "{code} {out} {err}");
    assert_eq!(said(&schema, &["status", "k"]).0, 1);
    assert_eq!(guard.release()?, syncguard::ReleaseResult::NotHeld);
    assert_eq!(said(&schema, &["break", "k"]).0, 64, "without a fence it could be anybody's");

    let permit = client.semaphore("s", 2)?.acquire()?;
    let (number, fence) = (permit.permit().expect("a number").to_string(), permit.fence().to_string());
    assert_eq!(said(&schema, &["break", "s", "--fence", &fence]).0, 75, "it is no lock");
    let broken = said(&schema, &["break", "s", "--permit", &number, "--fence", &fence, "--json"]);
    assert_eq!((broken.0, json(&broken.1)["broken"].as_str()), (0, Some(&*fence)), "{broken:?}");
    assert_eq!(said(&schema, &["list"]).1, "nothing is held\n");
    Ok(())
}

#[test]
fn bench_measures_and_leaves_nothing_held() {
    let schema = support::schema();
    let measured = said(&schema, &["bench", "--time", "1s", "--json"]);
    let found = json(&measured.1);
    let count = |row: &Value| row["count"].as_u64().is_some_and(|count| count > 0) && row["p50_us"].is_u64();
    assert!(
        measured.0 == 0 && found.as_array().is_some_and(|rows| rows.len() == 4 && rows.iter().all(count)),
        "{found}"
    );
    assert!(said(&schema, &["bench", "--time", "50ms"]).1.starts_with("IN MILLISECONDS "));
    assert_eq!(said(&schema, &["list"]).1, "nothing is held\n");
}

#[test]
fn completions_and_manual_pages_name_every_subcommand() -> Done {
    let schema = support::schema();
    let dir = crate::program::Dir::new();
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = said(&schema, &["completions", shell]);
        assert!(code == 0 && out.contains("on-lost") && out.contains("waiters"), "{shell}: {out}");
    }
    let (code, out, _) = said(&schema, &["man"]);
    assert!(code == 0 && out.starts_with(".ie") | out.contains(".TH syncguard"), "{out}");
    assert_eq!(said(&schema, &["man", "--dir", dir.path("pages").to_str().expect("text")]).0, 0);
    let run = std::fs::read_to_string(dir.path("pages/syncguard-run.1"))?;
    assert!(run.contains("SYNCGUARD_FENCE") && run.contains("busy"), "{run}");
    Ok(())
}

#[test]
fn check_fails_where_something_is_unsafe_and_says_what_mends_it() {
    let server = support::Server::start(&support::Config::new());
    let check = |args: &[&str]| told(&bare().env("SYNCGUARD_URL", server.url()).args(args).output().unwrap());
    assert_eq!(check(&["setup"]).0, 0);
    for (fsync, found) in [("on", false), ("off", true)] {
        server.configure("fsync", fsync);
        let (code, out, err) = check(&["check", "--json"]);
        let findings = json(&out);
        let findings = findings.as_array().expect("an array");
        let of_fsync = findings.iter().find(|finding| finding["code"] == "fsync");
        assert_eq!((of_fsync.is_some(), err.as_str()), (found, ""), "{out}");
        let is_unsafe = findings.iter().any(|finding| finding["severity"] == "unsafe");
        assert_eq!(code, i32::from(is_unsafe), "{out}");
    }
    let (code, out, _) = check(&["check"]);
    assert!(code == 1 && out.contains("unsafe  fsync: fsync = off\n        "), "{out}");
    assert!(out.contains("mend with: ALTER SYSTEM SET fsync = on") && out.contains(" UNSAFE, "), "{out}");
}

#[test]
fn check_names_an_engine_that_is_not_postgresql() {
    let schema = support::schema();
    let proxy = support::Proxy::start(support::server().port());
    let version = "'PostgreSQL 15.12-YB-2025.1.0.0-b0 on x86_64-pc-linux-gnu'";
    proxy.rewrite(move |said| {
        said.text.replace("pg_catalog.version()", &format!("pg_catalog.concat({version})"))
    });
    for json in [&[][..], &["--json"]] {
        let mut command = bare();
        command.env("SYNCGUARD_URL", proxy.url(&schema.url())).arg("check").args(json);
        let (code, out, err) = told(&command.output().expect("the command runs"));
        assert!(code == 64 && out.is_empty(), "{code} {out} {err}");
        assert!(
            err.contains("YugabyteDB, not PostgreSQL") && err.contains("two could hold one key"),
            "{err}"
        );
    }
}

#[test]
fn help_names_the_exit_codes() {
    let schema = support::schema();
    let (code, out, _) = said(&schema, &["run", "--help"]);
    assert_eq!(code, 0);
    for part in ["75   somebody else has the lock", "76   the lock was lost", "128 + N", "SYNCGUARD_LOCK_ID"]
    {
        assert!(out.contains(part), "{part}: {out}");
    }
    // The options by subject, and those of every command last.
    let headings = ["\nOptions:", "\nOnce per period:", "\nWhen the lock is lost", "\nServer and output:"];
    let places: Vec<_> = headings.map(|heading| out.find(heading)).into_iter().collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?} {out}");
    assert_eq!(said(&schema, &["run", "--kye", "k"]).0, 64);
    assert_eq!(said(&schema, &["--version"]).0, 0);
}
