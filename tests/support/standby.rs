//! A second server that follows a first one, made with `pg_basebackup`.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::time::Duration;

use super::account::Account;
use super::server::Server;

/// A physical standby of this server.
pub fn standby_of(primary: &Server, name: &str) -> Standby {
    let account = Account::find().unwrap();
    let dir = primary.dir().join(name);
    let program = primary.bindir().join("pg_basebackup");
    assert!(
        program.is_file(),
        "{} is missing: a standby needs a full installation of PostgreSQL",
        program.display()
    );
    let mut copy = account.command(program);
    copy.args(["-R", "-X", "stream", "--checkpoint=fast", "--no-sync", "-D"]).arg(&dir);
    copy.args(["-d", &format!("{}?application_name={name}", primary.url())]).current_dir("/");
    let output = copy.output().expect("pg_basebackup starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A port of its own, beside the primary's.
    let port = (primary.port() + 1..primary.port() + 200)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port");
    let standby = Standby { account, bindir: primary.bindir().to_owned(), dir, port };
    let options = format!("-p {port} -k {} -c listen_addresses=127.0.0.1", primary.dir().display());
    standby.ctl(&["start", "-w", "-l", &standby.dir.join("standby.log").to_string_lossy(), "-o", &options]);
    standby
}

/// Makes a call, and meanwhile has every process that waits for a standby get this signal, again and
/// again: `pg_cancel_backend`, which answers "success" with a warning, or `pg_terminate_backend`.
pub fn signal_waits_for_a_standby<R: Send>(
    sql: &mut postgres::Client,
    signal: &str,
    call: impl FnOnce() -> R + Send,
) -> R {
    let all = format!("SELECT {signal}(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
    std::thread::scope(|scope| {
        let call = scope.spawn(call);
        while !call.is_finished() {
            sql.batch_execute(&all).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        call.join().expect("no panic")
    })
}

pub struct Standby {
    account: Account,
    bindir: std::path::PathBuf,
    dir: std::path::PathBuf,
    pub port: u16,
}

impl Standby {
    pub fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn ctl(&self, args: &[&str]) {
        let mut command = self.account.command(self.bindir.join("pg_ctl"));
        command.args(args).arg("-s").arg("-D").arg(&self.dir).current_dir("/");
        // The server inherits our output, and would keep a pipe of it open.
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        assert!(command.status().expect("pg_ctl starts").success(), "{args:?}: {}", self.log());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("standby.log")).unwrap_or_default()
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let mut command = self.account.command(self.bindir.join("pg_ctl"));
        let _ =
            command.args(["stop", "-s", "-m", "immediate", "-D"]).arg(&self.dir).current_dir("/").status();
    }
}
