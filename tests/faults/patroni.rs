//! Three etcd and three PostgreSQL under Patroni. Each node (one of each) has a network namespace of its own; a bridge joins
//! them, and pulling a node's cable is taking its end of the bridge down. Runs inside of `scripts/ha`, whose process
//! namespace ends all of it.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::account::Account;
use crate::support::binaries::binaries;
use crate::support::wait::{poll, wait_until};

pub const NODES: usize = 3;

/// How long a cluster may take to be whole again.
const WHOLE: Duration = Duration::from_secs(120);

/// Patroni's own times, in seconds: those of the page.
pub const TTL: u64 = 20;
pub const LOOP_WAIT: u64 = 2;
pub const RETRY_TIMEOUT: u64 = 5;

pub struct Node {
    n: usize,
    /// Keeps the namespace.
    net: Child,
    etcd: Option<Child>,
    patroni: Option<Child>,
}

pub struct Patroni {
    dir: PathBuf,
    tools: PathBuf,
    account: Account,
    nodes: Vec<Node>,
}

/// What a member says of itself.
#[allow(clippy::struct_excessive_bools, reason = "each is said of its own")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    pub running: bool,
    pub primary: bool,
    pub sync: bool,
    pub streaming: bool,
}

fn run(program: &str, args: &[&str]) {
    let output =
        Command::new(program).args(args).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub fn address(n: usize) -> String {
    format!("10.77.0.{}", 11 + n)
}

impl Node {
    fn link(&self) -> String {
        format!("node{}", self.n)
    }

    fn start(n: usize) -> Self {
        let net = Command::new("unshare").args(["--net", "sleep", "infinity"]).spawn().expect("a namespace");
        let node = Self { n, net, etcd: None, patroni: None };
        let own = fs::read_link("/proc/self/ns/net").expect("a namespace of our own");
        let theirs = format!("/proc/{}/ns/net", node.net.id());
        wait_until(WHOLE, "the namespace is there", || fs::read_link(&theirs).is_ok_and(|ns| ns != own));
        let link = node.link();
        run(
            "ip",
            &[
                "link",
                "add",
                &link,
                "type",
                "veth",
                "peer",
                "name",
                "inside",
                "netns",
                &node.net.id().to_string(),
            ],
        );
        run("ip", &["link", "set", &link, "master", "nodes"]);
        run("ip", &["link", "set", &link, "up"]);
        let namespace = format!("--net={theirs}");
        let inside = format!("{}/24", address(n));
        for args in [
            vec!["link", "set", "lo", "up"],
            vec!["addr", "add", &inside, "dev", "inside"],
            vec!["link", "set", "inside", "up"],
        ] {
            run("nsenter", &[&[namespace.as_str(), "ip"], &*args].concat());
        }
        node
    }

    /// The processes in its namespace with this name.
    fn processes(&self, names: &[&str]) -> Vec<u32> {
        let namespace =
            fs::read_link(format!("/proc/{}/ns/net", self.net.id())).expect("the namespace is there");
        let processes = fs::read_dir("/proc").expect("/proc is mounted").flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        numbers
            .filter(|pid| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                names.contains(&name.trim())
                    && fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|ns| ns == namespace)
            })
            .collect()
    }
}

/// Sends a signal to a process that may be gone.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// The names of a node's programs, as the kernel has them.
pub const POSTGRES: &[&str] = &["postgres"];
pub const AGENT: &[&str] = &["patroni", "python", "python3"];

impl Patroni {
    /// A whole cluster, with synchronous replication and the strict mode.
    pub fn start(dir: &Path, tools: &Path) -> Self {
        run("ip", &["link", "set", "lo", "up"]);
        run("ip", &["link", "add", "nodes", "type", "bridge"]);
        run("ip", &["addr", "add", "10.77.0.1/24", "dev", "nodes"]);
        run("ip", &["link", "set", "nodes", "up"]);
        let account = Account::find().expect("PostgreSQL runs as an ordinary account");
        let nodes = (0..NODES).map(Node::start).collect();
        let mut all = Self { dir: dir.to_owned(), tools: tools.to_owned(), account, nodes };
        for n in 0..NODES {
            all.configure(n);
            all.start_etcd(n);
        }
        wait_until(WHOLE, "etcd has a leader", || etcd_leader().is_some());
        all.start_agent(0);
        wait_until(WHOLE, "the first node is the primary", || primary() == Some(0));
        (1..NODES).for_each(|n| all.start_agent(n));
        wait_until_whole();
        all
    }

    fn file(&self, name: &str, n: usize) -> PathBuf {
        self.dir.join(format!("{name}{n}"))
    }

    /// A command inside of the node, as the account of the server.
    fn inside(&self, n: usize, program: &Path, log: &str) -> Command {
        let namespace = format!("--net=/proc/{}/ns/net", self.nodes[n].net.id());
        let mut command = Command::new("nsenter");
        command.arg(namespace);
        if let Account::Other { uid, gid, .. } = &self.account {
            let (uid, gid) = (uid.to_string(), gid.to_string());
            command.args(["setpriv", "--reuid", &uid, "--regid", &gid, "--clear-groups"]);
        }
        let log = File::options().create(true).append(true).open(self.file(log, n)).expect("a log");
        command.arg(program).current_dir(&self.dir).process_group(0).stdin(Stdio::null());
        command.env("HOME", &self.dir).env_remove("PYTHONPATH");
        command.stdout(log.try_clone().expect("a handle can be copied")).stderr(log);
        command
    }

    pub fn start_etcd(&mut self, n: usize) {
        let name = |n: usize| format!("etcd{n}");
        let peer = |n: usize| format!("http://{}:2380", address(n));
        let client = format!("http://{}:2379", address(n));
        let all: Vec<_> = (0..NODES).map(|n| format!("{}={}", name(n), peer(n))).collect();
        let data = self.file("etcd-data", n);
        let state = if data.exists() { "existing" } else { "new" };
        let mut command = self.inside(n, &self.tools.join("usr/bin/etcd"), "etcd-log");
        command.args([
            "--name",
            &name(n),
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ]);
        command.args(["--listen-peer-urls", &peer(n), "--initial-advertise-peer-urls", &peer(n)]);
        command
            .args(["--initial-cluster", &all.join(","), "--initial-cluster-state", state])
            .arg("--data-dir")
            .arg(data);
        self.nodes[n].etcd = Some(command.spawn().expect("etcd starts"));
    }

    pub fn kill_etcd(&mut self, n: usize) {
        let Some(mut etcd) = self.nodes[n].etcd.take() else { return };
        let _ = etcd.kill();
        let _ = etcd.wait();
    }

    pub fn start_agent(&mut self, n: usize) {
        let mut command = self.inside(n, &self.tools.join("venv/bin/patroni"), "patroni-log");
        self.nodes[n].patroni =
            Some(command.arg(self.file("patroni.yml", n)).spawn().expect("Patroni starts"));
    }

    /// The end of what was killed is waited for.
    pub fn reap_agent(&mut self, n: usize) {
        if let Some(mut agent) = self.nodes[n].patroni.take() {
            let _ = agent.wait();
        }
    }

    /// Sends a signal to all of these processes of a node, those that come meanwhile included.
    pub fn signal(&self, n: usize, names: &[&str], signal: Signal) {
        let mut seen = Vec::new();
        loop {
            let new: Vec<_> =
                self.nodes[n].processes(names).into_iter().filter(|pid| !seen.contains(pid)).collect();
            if new.is_empty() {
                return;
            }
            new.iter().for_each(|pid| send(*pid, signal));
            seen.extend(new);
        }
    }

    /// Those processes that send the log to the standbys.
    pub fn stop_sending(&self, n: usize) {
        for pid in self.nodes[n].processes(POSTGRES) {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains("walsender") {
                send(pid, Signal::STOP);
            }
        }
    }

    pub fn cable(&self, n: usize, plugged: bool) {
        run("ip", &["link", "set", &self.nodes[n].link(), if plugged { "up" } else { "down" }]);
    }

    fn configure(&self, n: usize) {
        let mut file = File::create(self.file("patroni.yml", n)).expect("a file can be made");
        file.write_all(self.settings(n).as_bytes()).expect("a file can be written");
        if let Some(owner) = self.account.owner() {
            run("chown", &[&owner, &self.dir.to_string_lossy()]);
        }
    }

    fn settings(&self, n: usize) -> String {
        let hosts: Vec<_> = (0..NODES).map(|n| format!("{}:2379", address(n))).collect();
        let (host, dir, bin) = (address(n), self.dir.display(), binaries().dir.display());
        format!(
            r#"
scope: syncguard
name: n{n}
restapi: {{listen: "{host}:8008", connect_address: "{host}:8008"}}
etcd3: {{hosts: "{hosts}"}}
bootstrap:
  dcs:
    ttl: {TTL}
    loop_wait: {LOOP_WAIT}
    retry_timeout: {RETRY_TIMEOUT}
    maximum_lag_on_failover: 104857600
    synchronous_mode: true
    synchronous_mode_strict: true
    primary_start_timeout: 0
    postgresql:
      use_pg_rewind: true
      parameters: {{wal_level: replica, hot_standby: "on", max_connections: 60, max_wal_senders: 8, max_replication_slots: 8, wal_log_hints: "on", wal_keep_size: 256MB, shared_buffers: 32MB, fsync: "on", synchronous_commit: "on", log_line_prefix: "%m [%p] %a "}}
  initdb: [encoding: UTF8, auth: trust]
  pg_hba: ["local all all trust", "host all all 10.77.0.0/24 trust", "host replication all 10.77.0.0/24 trust"]
postgresql:
  listen: "{host}:5432"
  connect_address: "{host}:5432"
  data_dir: {dir}/data{n}
  bin_dir: {bin}
  pgpass: {dir}/pgpass{n}
  authentication: {{superuser: {{username: postgres, password: x}}, replication: {{username: postgres, password: x}}, rewind: {{username: postgres, password: x}}}}
  parameters: {{unix_socket_directories: ""}}
watchdog: {{mode: "off"}}
"#,
            hosts = hosts.join(","),
        )
    }
}

/// Where clients connect: all of the nodes.
pub fn url() -> String {
    let hosts: Vec<_> = (0..NODES).map(|n| format!("{}:5432", address(n))).collect();
    format!("postgresql://postgres@{}/postgres?target_session_attrs=read-write", hosts.join(","))
}

pub fn etcd_leader() -> Option<usize> {
    (0..NODES).find(|n| {
        let status = post(*n, 2379, "POST", "/v3/maintenance/status", "{}").unwrap_or_default();
        !status["leader"].is_null() && status["leader"] == status["header"]["member_id"]
    })
}

pub fn member(n: usize) -> Member {
    let Some(said) = post(n, 8008, "GET", "/patroni", "") else { return Member::default() };
    Member {
        running: said["state"] == "running" || said["state"] == "streaming",
        primary: said["role"] == "primary" || said["role"] == "master",
        sync: said["sync_standby"] == true,
        streaming: said["replication_state"] == "streaming",
    }
}

pub fn members() -> Vec<Member> {
    (0..NODES).map(member).collect()
}

pub fn primary() -> Option<usize> {
    members().iter().position(|member| member.primary && member.running)
}

/// Another one than this.
pub fn wait_for_other_primary(old: usize) -> usize {
    let mut found = None;
    wait_until(WHOLE, "another node is the primary", || {
        found = (0..NODES).filter(|n| *n != old).find(|n| {
            let member = member(*n);
            member.primary && member.running
        });
        found.is_some()
    });
    found.expect("waited for")
}

/// One primary, two standbys that follow it, one of them synchronous.
pub fn wait_until_whole() -> usize {
    let mut said = Vec::new();
    let whole = poll(WHOLE, || {
        said = members();
        let following = |member: &&Member| !member.primary && member.running && member.streaming;
        said.iter().filter(|member| member.primary && member.running).count() == 1
            && said.iter().filter(following).count() == NODES - 1
            && (!is_synchronous() || said.iter().any(|member| member.sync))
    });
    assert!(whole, "the cluster is not whole after {WHOLE:?}: {said:?}");
    said.iter().position(|member| member.primary).expect("there is one")
}

fn is_synchronous() -> bool {
    (0..NODES)
        .find_map(|n| post(n, 8008, "GET", "/config", ""))
        .is_some_and(|said| said["synchronous_mode"] == true)
}

pub fn set_synchronous(on: bool) {
    let config = json!({ "synchronous_mode": on, "synchronous_mode_strict": on }).to_string();
    let primary = wait_until_whole();
    assert!(post(primary, 8008, "PATCH", "/config", &config).is_some(), "Patroni takes the settings");
    let mut sql = connect(primary).expect("the primary takes connections");
    wait_until(WHOLE, "the primary has the settings", || {
        let names: String =
            sql.query_one("SHOW synchronous_standby_names", &[]).expect("the primary answers").get(0);
        names.is_empty() != on
    });
}

pub fn switch_over(from: usize) {
    let members = members();
    let to = members.iter().position(|member| member.sync).expect("the cluster is whole");
    let body = json!({ "leader": format!("n{from}"), "candidate": format!("n{to}") }).to_string();
    let _ = post(from, 8008, "POST", "/switchover", &body);
}

/// A connection to one node, whatever it is.
pub fn connect(n: usize) -> Option<postgres::Client> {
    config(n).connect(postgres::NoTls).ok()
}

pub fn config(n: usize) -> postgres::Config {
    let mut config = postgres::Config::new();
    config.host(&address(n)).port(5432).user("postgres").dbname("postgres").application_name("observer");
    config.connect_timeout(Duration::from_millis(500)).tcp_user_timeout(Duration::from_secs(1));
    config
}

/// What a program of a node answers, if it is JSON; with a status of 400 or more it is, too.
fn post(n: usize, port: u16, method: &str, path: &str, body: &str) -> Option<Value> {
    let limit = Duration::from_millis(if method == "GET" { 500 } else { 20_000 });
    let at: SocketAddr = format!("{}:{port}", address(n)).parse().expect("an address");
    let mut stream = TcpStream::connect_timeout(&at, limit.min(Duration::from_millis(500))).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    let head = format!("{method} {path} HTTP/1.0\r\nHost: {at}\r\nContent-Type: application/json\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    // Patroni answers some calls with a sentence.
    Some(serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned())))
}
