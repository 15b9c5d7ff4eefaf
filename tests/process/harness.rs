//! The test harness itself: a server out of nothing, and nothing left of it afterwards.

#![allow(clippy::expect_used, reason = "a test says by a panic what it did not expect")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::account::Account;
use crate::support::binaries::{Binaries, Search, parse_version};
use crate::support::{
    Action, Config, LIMIT, Proxy, Server, Stop, TestSchema, Worker, logs, together, wait_until,
    wait_until_app_waits, wait_until_backend_gone, wait_until_backend_waits, worker,
};
use postgres::{Client, NoTls};

type Done = Result<(), Box<dyn std::error::Error>>;

fn backend_pid(client: &mut Client) -> Result<i32, postgres::Error> {
    Ok(client.query_one("SELECT pg_backend_pid()", &[])?.get(0))
}

/// Whether a server takes connections there. The driver would wait without end for a frozen one, so
/// this asks the first question of the protocol by hand: "do you speak TLS?"
fn answers(url: &str) -> bool {
    let Ok(config) = url.parse::<postgres::Config>() else { return false };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let asked = stream.write_all(&[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f]);
    let limited = stream.set_read_timeout(Some(Duration::from_millis(300)));
    asked.is_ok() && limited.is_ok() && stream.read_exact(&mut [0]).is_ok()
}

/// Whether a process exists, an unreaped one not counted.
fn lives(pid: &str) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.contains(") Z "),
        Err(_) => std::process::Command::new("/bin/sh")
            .args(["-c", "kill -0 \"$0\" 2>/dev/null", pid])
            .status()
            .is_ok_and(|status| status.success()),
    }
}

#[test]
fn the_server_answers_over_tcp_and_over_its_socket() -> Done {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    for url in [server.url(), server.socket_url()] {
        let mut client = Client::connect(url, NoTls)?;
        let row =
            client.query_one("SELECT current_setting('server_encoding'), inet_server_addr()::text", &[])?;
        assert_eq!(row.get::<_, String>(0), "UTF8");
        assert_eq!(row.get::<_, Option<String>>(1).is_some(), url == server.url(), "{url}");
    }
    assert!(server.bindir().join("postgres").is_file());
    let file = fs::read_to_string(server.data_dir().join("postmaster.pid"))?;
    assert_eq!(file.lines().next().map(str::to_owned), server.pid().map(|pid| pid.to_string()));
    Ok(())
}

#[test]
fn the_version_is_that_of_the_chosen_programs() -> Done {
    let _alone = crate::support::alone();
    let (major, _) = crate::support::binaries::binaries().version;
    let sql = "SELECT current_setting('server_version_num')::int / 10000";
    let row = Server::start(&Config::new()).client().query_one(sql, &[])?;
    assert_eq!(u32::try_from(row.get::<_, i32>(0))?, major);
    Ok(())
}

#[test]
fn the_server_never_runs_as_root() -> Done {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    assert_ne!(fs::metadata(server.data_dir())?.uid(), 0);
    if let Ok(process) = fs::metadata(format!("/proc/{}", server.pid().ok_or("not running")?)) {
        assert_ne!(process.uid(), 0);
    }
    Ok(())
}

#[test]
fn root_needs_an_ordinary_account() {
    let _alone = crate::support::alone();
    let refused = Account::first_ordinary(&["root".into(), "no-such-account".into()]);
    assert!(refused.is_err_and(|message| message.contains("SYNCGUARD_TEST_PG_USER")));
    let found = Account::first_ordinary(&["no-such-account".into(), "nobody".into()]);
    assert!(matches!(found, Ok(Account::Other { name, uid: 1.., .. }) if name == "nobody"));
}

#[test]
fn without_programs_the_message_says_what_to_install() {
    let _alone = crate::support::alone();
    let nothing =
        Search { chosen: None, path: Some("/nonexistent".into()), patterns: vec!["/none/*/bin".into()] };
    let message = nothing.newest().expect_err("there is nothing to find");
    for part in ["apt-get install postgresql", "SYNCGUARD_TEST_PG_BINDIR", "SYNCGUARD_TEST_URL", "`initdb`"] {
        assert!(message.contains(part), "{part} is missing in: {message}");
    }
    let wrong = Search { chosen: Some("/nonexistent".into()), ..Search::from_env() };
    let message = wrong.newest().expect_err("a wrong choice is not replaced by a guess");
    assert!(message.contains("SYNCGUARD_TEST_PG_BINDIR: no PostgreSQL server in /nonexistent"), "{message}");
}

#[test]
fn the_newest_installation_is_used() -> Done {
    let _alone = crate::support::alone();
    let base = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(crate::support::unique());
    for version in ["9.6.1", "14.2", "14.11"] {
        let dir = base.join(version).join("bin");
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("initdb"), "")?;
        let script = dir.join("postgres");
        // Written by another process: a file this process has open for writing cannot be started,
        // nor can one that a child forked at this moment has inherited.
        let text = format!(
            "printf '%s\\n' '#!/bin/sh' 'echo postgres \"(PostgreSQL)\" {version}' >\"$0\"; chmod 755 \"$0\""
        );
        assert!(std::process::Command::new("/bin/sh").args(["-c", &text]).arg(&script).status()?.success());
    }
    let search = Search { patterns: vec![format!("{}/*/bin", base.display())], ..Search::default() };
    let found = search.newest()?;
    assert_eq!(found, Binaries { dir: base.join("14.11/bin"), version: (14, 11) });
    fs::remove_dir_all(base)?;
    Ok(())
}

#[test]
fn versions_are_read_as_the_programs_print_them() {
    let _alone = crate::support::alone();
    assert_eq!(parse_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some((15, 18)));
    assert_eq!(parse_version("postgres (PostgreSQL) 19beta1"), Some((19, 0)));
    assert_eq!(parse_version("postgres: command not found"), None);
}

#[test]
fn tests_do_not_see_each_others_tables() -> Done {
    let _alone = crate::support::alone();
    let schemas: Vec<TestSchema> = together(4, |_| crate::support::schema());
    for (i, schema) in schemas.iter().enumerate() {
        let mut client = schema.client();
        client.batch_execute("CREATE TABLE t (v text)")?;
        client.execute("INSERT INTO t VALUES ($1)", &[&i.to_string()])?;
    }
    for (i, schema) in schemas.iter().enumerate() {
        for url in [schema.url(), schema.socket_url()] {
            let row =
                Client::connect(&url, NoTls)?.query_one("SELECT v, current_schema()::text FROM t", &[])?;
            assert_eq!((row.get(0), row.get(1)), (i.to_string(), schema.name().to_owned()));
        }
    }
    Ok(())
}

#[test]
fn a_schema_is_dropped_with_its_value_and_after_a_panic() -> Done {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let name = schema.name().to_owned();
    schema.client().batch_execute("CREATE TABLE t ()")?;
    let failed = std::panic::catch_unwind(move || {
        let _schema = schema;
        std::panic::resume_unwind(Box::new("a failing test"));
    });
    assert!(failed.is_err());
    let sql = "SELECT count(*) FROM pg_namespace WHERE nspname = $1";
    assert_eq!(crate::support::server().client().query_one(sql, &[&name])?.get::<_, i64>(0), 0);
    Ok(())
}

#[test]
fn a_dropped_server_leaves_nothing_behind() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let (dir, pid) = (server.dir().to_owned(), server.pid().expect("it runs").to_string());
    assert!(dir.is_dir() && lives(&pid));
    drop(server);
    assert!(!dir.exists() && !lives(&pid));
}

/// Starts a server in a worker process, ends the worker in some way, and sees everything go.
fn leaves_nothing(test: &str, part: &str, end: impl FnOnce(&mut Worker)) {
    let mut worker = Worker::start_alone(test, part, &[]);
    let (dir, pid, url) = (worker.hear(), worker.hear(), worker.hear());
    assert!(Path::new(&dir).is_dir() && lives(&pid) && answers(&url));
    end(&mut worker);
    wait_until(LIMIT, "the directory is gone", || !Path::new(&dir).exists());
    wait_until(LIMIT, "the server has ended", || !lives(&pid) && !answers(&url));
}

fn says_what_it_started(parent: &worker::Parent) {
    let server = crate::support::server();
    parent.say(&server.dir().to_string_lossy());
    parent.say(&server.pid().expect("it runs").to_string());
    parent.say(server.url());
}

#[test]
fn a_killed_test_process_leaves_nothing_behind() {
    let _alone = crate::support::alone();
    worker::part("server", |parent| {
        says_what_it_started(parent);
        parent.wait_forever();
    });
    leaves_nothing("a_killed_test_process_leaves_nothing_behind", "server", Worker::kill);
}

#[test]
fn a_killed_test_process_with_a_stopped_backend_leaves_nothing_behind() {
    let _alone = crate::support::alone();
    worker::part("frozen", |parent| {
        says_what_it_started(parent);
        parent.hear();
        crate::support::server().freeze();
        parent.say("frozen");
        parent.wait_forever();
    });
    leaves_nothing(
        "a_killed_test_process_with_a_stopped_backend_leaves_nothing_behind",
        "frozen",
        |worker| {
            worker.tell("freeze");
            worker.expect("frozen");
            worker.kill();
        },
    );
}

#[test]
fn a_failed_test_leaves_nothing_behind() {
    let _alone = crate::support::alone();
    worker::part("failing", |parent| {
        says_what_it_started(parent);
        parent.hear();
        std::panic::resume_unwind(Box::new("a failing test"));
    });
    leaves_nothing("a_failed_test_leaves_nothing_behind", "failing", |worker| {
        worker.tell("fail");
        assert!(!worker.join().success());
    });
}

#[test]
fn a_worker_uses_the_server_of_its_test_and_ends_with_it() {
    let _alone = crate::support::alone();
    worker::part("echo", |parent| {
        let mut client = Client::connect(&parent.arg("url"), NoTls).expect("the parent's server answers");
        let row = client.query_one("SELECT current_schema()::text", &[]).expect("the server answers");
        parent.say(row.get(0));
        assert!(!crate::support::server().is_ours());
        parent.say(crate::support::server().url());
        parent.say(&parent.hear());
        parent.wait_forever();
    });
    let schema = crate::support::schema();
    let url = schema.url();
    let test = "a_worker_uses_the_server_of_its_test_and_ends_with_it";
    let mut worker = Worker::start(test, "echo", &[("url", &url)]);
    worker.expect(schema.name());
    worker.expect(crate::support::server().url());
    worker.tell("hello");
    worker.expect("hello");
    let id = worker.id().to_string();
    assert!(lives(&id));
    drop(worker);
    assert!(!lives(&id));
}

#[test]
fn a_private_server_is_stopped_in_every_way_and_comes_back() -> Done {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new().fsync(true).set("max_connections", "17"));
    let mut client = server.client();
    let shown =
        client.query_one("SELECT current_setting('fsync'), current_setting('max_connections')", &[])?;
    assert_eq!((shown.get(0), shown.get(1)), ("on".to_owned(), "17".to_owned()));
    client.batch_execute("CREATE TABLE kept (n int)")?;
    drop(client);
    let port = server.port();
    for (n, how) in (1i64..).zip([Stop::Smart, Stop::Fast, Stop::Immediate, Stop::Kill]) {
        server.client().batch_execute("INSERT INTO kept VALUES (1)")?;
        let pid = server.pid();
        server.stop(how);
        assert!(server.pid().is_none() && !answers(server.url()), "{how:?}");
        server.start_again();
        assert!(server.pid() != pid && server.port() == port);
        let row = server.client().query_one("SELECT count(*) FROM kept", &[])?;
        assert_eq!(row.get::<_, i64>(0), n, "{how:?}");
    }
    Ok(())
}

#[test]
fn a_killed_server_leaves_nothing_behind() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    server.stop(Stop::Kill);
    let dir = server.dir().to_owned();
    drop(server);
    assert!(!dir.exists());
}

#[test]
fn a_setting_can_change_while_the_server_runs() -> Done {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    server.configure("log_statement", "all");
    server.configure("application_name", "it's set");
    let row =
        server.client().query_one("SELECT current_setting('application_name') AS marked_statement", &[])?;
    assert_eq!(row.get::<_, String>(0), "it's set");
    assert!(server.log().contains("marked_statement"));
    Ok(())
}

#[test]
fn a_frozen_server_answers_nothing_until_it_is_thawed() -> Done {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let mut client = server.client();
    client.batch_execute("SELECT 1")?;
    server.freeze();
    assert!(!answers(server.url()));
    let answered = std::thread::scope(|scope| {
        let query = scope.spawn(|| client.batch_execute("SELECT 1").is_ok());
        assert!(!crate::support::wait::poll(Duration::from_millis(200), || query.is_finished()));
        server.thaw();
        query.join()
    });
    assert!(matches!(answered, Ok(true)));
    assert!(answers(server.url()));
    Ok(())
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let _alone = crate::support::alone();
    let failed = Server::try_start(&Config::new().set("no_such_setting", "1"));
    let message = failed.map(|_| ()).expect_err("PostgreSQL refuses an unknown setting");
    assert!(message.contains("no_such_setting"), "{message}");
}

#[test]
fn a_waiting_backend_is_seen_by_name_and_by_process_id() -> Done {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let mut holder = schema.client();
    let mut observer = schema.client();
    let app = format!("waiter-{}", schema.name());
    holder.batch_execute("CREATE TABLE t ()")?;
    holder.batch_execute("BEGIN; LOCK TABLE t")?;
    let mut waiter = schema.client_named(&app);
    let pid = backend_pid(&mut waiter)?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || waiter.batch_execute("BEGIN; LOCK TABLE t; COMMIT"));
        assert_eq!(wait_until_app_waits(&mut observer, &app), pid);
        wait_until_backend_waits(&mut observer, pid);
        holder.batch_execute("COMMIT").expect("the holder lets go");
        assert!(matches!(waiting.join(), Ok(Ok(()))));
    });
    wait_until_backend_gone(&mut observer, pid);
    Ok(())
}

#[test]
fn a_proxy_rewrites_what_is_said_and_what_is_prepared() -> Done {
    let _alone = crate::support::alone();
    let server = crate::support::server();
    let proxy = Proxy::start(server.port());
    proxy.rewrite(|said| said.text.replace("'as sent'", "'rewritten, and longer'"));
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let see = std::sync::Arc::clone(&seen);
    proxy.on_query(move |sql| {
        see.lock().expect("nobody panics").push(sql.to_owned());
        Action::Pass
    });
    let mut client = Client::connect(&proxy.url(server.url()), NoTls)?;
    let said = client.simple_query("SELECT 'as sent'; SELECT 'as sent'")?;
    let said = said.iter().filter_map(|message| match message {
        postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    assert_eq!(said.collect::<Vec<_>>(), ["rewritten, and longer"; 2]);
    let row = client.query_one("SELECT 'as sent' || $1::text", &[&"?"])?;
    assert_eq!(row.get::<_, String>(0), "rewritten, and longer?");
    assert_eq!(proxy.rewritten(), 2, "one that is said, one that is prepared");
    let row = client.query_one("SELECT 'another'", &[])?;
    assert_eq!((row.get::<_, String>(0).as_str(), proxy.rewritten()), ("another", 2));
    let seen = seen.lock().expect("nobody panics");
    assert!(seen[0].contains("as sent") && !seen.iter().any(|sql| sql.contains("rewritten")), "{seen:?}");
    Ok(())
}

#[test]
fn waiting_has_a_limit_and_says_what_for() {
    let _alone = crate::support::alone();
    let start = Instant::now();
    let waiting = || wait_until(Duration::from_millis(30), "pigs fly", || false);
    let panic = std::panic::catch_unwind(waiting).expect_err("pigs do not fly");
    let text = panic.downcast_ref::<String>().map(String::as_str);
    assert!(text.is_some_and(|text| text.contains("pigs fly")), "{text:?}");
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[test]
fn log_lines_of_the_library_are_captured_with_level_and_thread() {
    let _alone = crate::support::alone();
    let mark = logs::exclusive();
    log::debug!(target: "syncguard::lock", "a quiet line");
    log::error!(target: "another_crate", "not ours: secret");
    mark.assert_quiet();
    mark.assert_without(&["secret"]);
    assert!(mark.all().iter().any(|line| line.text == "not ours: secret"));
    std::thread::scope(|scope| scope.spawn(|| log::warn!(target: "syncguard", "loud: secret")).join())
        .expect("the thread logs");
    assert_eq!(mark.at_least(log::Level::Warn).len(), 1);
    assert!(!mark.of_this_thread().iter().any(|line| line.text.contains("loud")));
    assert!(std::panic::catch_unwind(|| mark.assert_quiet()).is_err());
    assert!(std::panic::catch_unwind(|| mark.assert_without(&["secret"])).is_err());
}
