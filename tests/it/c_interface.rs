//! The C interface as programs in C use it, with AddressSanitizer: locks, callbacks, forks, endings.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

use crate::support::c::{compile, library_dir};
use crate::support::{Config, Server, tls};

/// What `pkg-config` says of libpq, which the programs use beside the library.
fn libpq() -> Vec<String> {
    let flags = Command::new("pkg-config").args(["--cflags", "--libs", "libpq"]).output();
    let flags = flags.expect("pkg-config is installed: scripts/test installs it");
    assert!(flags.status.success(), "libpq-dev is installed: scripts/test installs it");
    String::from_utf8_lossy(&flags.stdout).split_whitespace().map(ToOwned::to_owned).collect()
}

fn scratch() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c_interface");
    fs::create_dir_all(&dir).expect("a directory can be made");
    dir
}

/// A program of `ffi/tests`, compiled once.
fn program(name: &'static str) -> PathBuf {
    static COMPILED: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let both = COMPILED.get_or_init(|| {
        let libpq = libpq();
        let mut flags =
            vec!["-std=gnu99", "-pedantic", "-fsanitize=address,undefined", "-fno-sanitize-recover"];
        flags.extend(libpq.iter().map(String::as_str));
        ["tests/capabilities.c", "tests/guards.c"].map(|source| compile("cc", source, &scratch(), &flags))
    });
    let [capabilities, guards] = both.clone();
    if name == "guards" { guards } else { capabilities }
}

fn said(output: &Output) -> String {
    format!("{:?} {}", output.status, String::from_utf8_lossy(&output.stderr))
}

fn run(name: &'static str, cases: &[&str]) {
    for case in cases {
        let schema = crate::support::schema();
        let output = Command::new(program(name)).args([&schema.url(), schema.name(), case]).output();
        let output = output.expect("the program starts");
        assert!(output.status.success() && output.stderr.is_empty(), "{case}: {}", said(&output));
    }
}

#[test]
fn c_programs_have_several_keys_permits_elections_and_runs_once() {
    run(
        "capabilities",
        &[
            "several",
            "readers",
            "permits",
            "election",
            "owners",
            "campaign_cancelled",
            "once",
            "once_completed",
        ],
    );
}

#[test]
fn bad_input_from_c_is_refused_and_named() {
    run("capabilities", &["bad_input"]);
}

#[test]
fn c_holders_are_told_of_a_loss_once_and_never_after_the_release() {
    run(
        "guards",
        &[
            "lost",
            "several_lost",
            "released_is_not_lost",
            "release_ends_waits",
            "release_waits_for_the_callback",
            "callback_frees_its_guard_and_closes_the_client",
        ],
    );
}

#[test]
fn c_programs_choose_how_long_to_hold_and_what_ends_a_wait() {
    run("guards", &["max_hold", "min_hold", "token_ends_waits"]);
}

#[test]
fn c_handles_of_a_closed_client_and_of_a_parent_process_say_so() {
    run("guards", &["closed", "forked", "errors"]);
}

#[test]
fn c_threads_share_a_client_and_a_guard() {
    run("guards", &["threads", "one_of_many_releases"]);
}

#[test]
fn the_c_library_can_be_loaded_and_let_go_again_and_again() {
    let schema = crate::support::schema();
    let program = compile("cc", "tests/unload.c", &scratch(), &["-std=gnu99", "-ldl", "-Wl,--as-needed"]);
    let library = library_dir().join("libsyncguard_ffi.so");
    let output = Command::new(program).arg(library).args([&schema.url(), schema.name()]).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn an_exception_that_leaves_a_callback_ends_the_program_and_passes_no_frame_of_the_library() {
    let program = compile("c++", "tests/throws.cpp", &scratch(), &["-std=c++11", "-pedantic"]);
    for callback in ["lead", "job", "lost"] {
        let schema = crate::support::schema();
        let output = Command::new(&program).args([&schema.url(), schema.name(), callback]).output();
        let output = output.expect("the program starts");
        // SIGABRT
        assert_eq!(output.status.signal(), Some(6), "{callback}: {}", said(&output));
    }
}

#[test]
fn a_service_in_c_leads_pays_once_and_ends_at_a_signal() {
    let schema = crate::support::schema();
    let libpq = libpq();
    let flags: Vec<&str> =
        ["-std=gnu99", "-pedantic"].into_iter().chain(libpq.iter().map(String::as_str)).collect();
    let program = compile("cc", "examples/jobs.c", &scratch(), &flags);
    let start = || {
        let mut command = Command::new(&program);
        command.arg(schema.url()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("it is piped"));
        (child, lines)
    };
    let line = |lines: &mut BufReader<ChildStdout>| {
        let mut line = String::new();
        lines.read_line(&mut line).expect("it can be read");
        line
    };
    let stop = |mut child: Child| {
        let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        let mut stderr = String::new();
        child.stderr.take().expect("it is piped").read_to_string(&mut stderr).expect("it can be read");
        assert!(child.wait().expect("it ends").success(), "{stderr}");
    };
    let (first, mut its_lines) = start();
    assert_eq!(line(&mut its_lines), "leads, term 1\n");
    assert!(line(&mut its_lines).starts_with("paid for "));
    let (second, mut later_lines) = start();
    stop(first);
    // A minute may have begun meanwhile.
    let mut last = line(&mut its_lines);
    while last.starts_with("paid for ") {
        last = line(&mut its_lines);
    }
    assert_eq!(last, "stopped\n");
    assert_eq!(line(&mut later_lines), "leads, term 2\n");
    stop(second);
    let twice: i64 = schema
        .client()
        .query_one("SELECT count(*) - count(DISTINCT period) FROM payment", &[])
        .expect("it can be read")
        .get(0);
    assert_eq!(twice, 0, "no minute was paid twice");
}

#[test]
fn what_is_installed_is_found_by_pkg_config_and_the_loader_and_says_its_version() {
    let (dir, schema) = (scratch().join("installed"), crate::support::schema());
    let (package, prefix) = (dir.join("package"), dir.join("usr/local"));
    let target = library_dir().parent().expect("a profile is in a target directory");
    let install = |destination: &str| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/install-c");
        let output = Command::new(script)
            .arg("--prefix")
            .arg(&prefix)
            .args(["--python", "--profile", if library_dir().ends_with("debug") { "dev" } else { "release" }])
            .arg("--target-dir")
            .arg(target)
            .env("DESTDIR", destination)
            .output()
            .expect("the script starts");
        assert!(output.status.success(), "{}", said(&output));
    };
    install("");
    install(&package.display().to_string());
    let file = |root: &Path| fs::read(root.join("lib/pkgconfig/syncguard.pc")).expect("it is installed");
    let staged = package.join(prefix.strip_prefix("/").expect("it is absolute"));
    assert_eq!(file(&staged), file(&prefix), "DESTDIR is in no file");

    let program = dir.join("transfer");
    let compile = format!(
        "cc -std=c99 -Wall -Werror '{}/ffi/examples/transfer.c' -o '{}' $(pkg-config --cflags --libs syncguard)",
        env!("CARGO_MANIFEST_DIR"),
        program.display(),
    );
    let shell = |line: &str| {
        let path = prefix.join("lib/pkgconfig");
        let output = Command::new("sh").args(["-c", line]).env("PKG_CONFIG_PATH", path).output();
        let output = output.expect("a shell starts");
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    shell(&compile);
    assert_eq!(shell("pkg-config --modversion syncguard").trim(), env!("CARGO_PKG_VERSION"));
    let needed = shell(&format!("readelf -d '{}'", program.display()));
    assert!(needed.contains("[libsyncguard.so.0.1]"), "{needed}");

    let ask = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p] + sys.argv[1:]; import syncguard; print(syncguard.library_version())";
    let version = shell(&format!(
        "LD_LIBRARY_PATH='{0}/lib' python3 -B -c \"{ask}\" '{0}'/lib/python3*/site-packages",
        prefix.display()
    ));
    assert_eq!(version.trim(), env!("CARGO_PKG_VERSION"));

    let accounts = dir.join("accounts");
    fs::write(&accounts, "100 0\n").expect("it can be written");
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .args([schema.url(), schema.name().to_owned()])
        .arg(&accounts)
        .arg("3")
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(fs::read_to_string(&accounts).expect("it is there"), "97 3\n");
    fs::remove_dir_all(dir).expect("it can be removed");
}

#[test]
fn c_programs_have_tls_by_url() {
    let server = Server::start(&Config::new());
    let certificate = tls::install(&server).to_pem().expect("it can be written down");
    let other = tls::Request::new("another").name("127.0.0.1").authority().sign_itself().pem();
    let (dir, program) = (server.dir(), compile("cc", "examples/transfer.c", &scratch(), &["-std=c99"]));
    fs::write(
        server.data_dir().join("pg_hba.conf"),
        "local all all trust\nhostssl all all 127.0.0.1/32 trust\n",
    )
    .expect("it can be written");
    server.configure("ssl", "on");
    let run = |url: String| {
        fs::write(dir.join("accounts"), "100 0\n").expect("it can be written");
        let mut command = Command::new(&program);
        let output = command.args([&url, "public"]).arg(dir.join("accounts")).arg("2").output();
        output.expect("it starts")
    };
    let url = |root: &str, pem: &[u8]| {
        fs::write(dir.join(root), pem).expect("it can be written");
        let root = dir.join(root).display().to_string().replace('/', "%2F");
        format!("{}?sslmode=verify-full&sslrootcert={root}", server.url())
    };
    let encrypted = run(url("own.pem", &certificate));
    assert!(encrypted.status.success(), "{}", said(&encrypted));
    for refused in [url("other.pem", &other), format!("{}?sslmode=disable", server.url())] {
        let output = run(refused);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    }
}
