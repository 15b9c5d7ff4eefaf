//! The example that shows metrics: what it exports, what the dashboard asks for, and what the manual lists are the
//! same names.

use std::collections::BTreeSet;
use std::env;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{LIMIT, schema, wait_until};

const DASHBOARD: &str = include_str!("../../examples/prometheus/dashboard.json");
const PAGE: &str = include_str!("../../docs/metrics.md");

struct Example(Child);

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the example, and says where it listens.
fn start(url: &str) -> (Example, String) {
    let test = env::current_exe().expect("a program knows its file");
    let profile = test.parent().and_then(Path::parent).expect("tests are built into PROFILE/deps");
    let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "-p", "syncguard", "--all-features", "--example", "prometheus"]);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    build.arg("--target-dir").arg(profile.parent().expect("a profile is in a target directory"));
    let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
    assert!(built.is_ok_and(|status| status.success()), "the example builds");
    let child = Command::new(profile.join("examples/prometheus"))
        .env("SYNCGUARD_URL", url)
        .env("LISTEN", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn();
    let mut example = Example(child.expect("the example starts"));
    let mut line = String::new();
    let stdout = example.0.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut line).expect("it says where it listens");
    let address = line.trim().strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics"));
    (example, address.expect("an address").to_owned())
}

fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the example listens");
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").expect("it hears");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers in text");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

/// One line of Prometheus' text format: a name, its labels, and a number.
fn samples(text: &str) -> impl Iterator<Item = (&str, &str, f64)> {
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
        let (series, value) = line.rsplit_once(' ').expect("a series and its value");
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        assert!(labels.ends_with('}'), "{line}");
        (name, labels, value.parse().expect("a number"))
    })
}

/// What begins with our name, in any text.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("syncguard_")).collect()
}

fn family(name: &str) -> &str {
    ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
}

#[test]
fn the_dashboard_and_the_manual_name_what_is_really_exported() {
    let schema = schema();
    let (_example, address) = start(&schema.url());
    let page: BTreeSet<&str> =
        PAGE.lines().filter_map(|line| line.strip_prefix("| `syncguard_")?.split('`').next()).collect();
    let listed: BTreeSet<String> = page.iter().map(|name| format!("syncguard_{name}")).collect();
    assert!(listed.len() > 8, "{listed:?}");
    let mut text = String::new();
    let kinds = ["lock", "set", "permit", "run"].map(|kind| format!("kind=\"{kind}\",result=\"granted\"}}"));
    // The renewals and losses among them take seconds, and four workers need their turns for them.
    wait_until(LIMIT * 5, "every metric has come once, and every kind of call", || {
        text = scrape(&address);
        let seen: BTreeSet<_> = samples(&text).map(|(name, ..)| family(name).to_owned()).collect();
        let granted = |kind: &String| {
            samples(&text)
                .any(|(name, labels, value)| name == "syncguard_calls_total" && labels == kind && value > 0.0)
        };
        listed.is_subset(&seen) && kinds.iter().all(granted)
    });
    let exported: BTreeSet<&str> = samples(&text).map(|(name, ..)| name).collect();
    let families: BTreeSet<String> = exported.iter().map(|name| family(name).to_owned()).collect();
    assert_eq!(families, listed, "the page lists what is exported, and nothing else");
    serde_json::from_str::<serde_json::Value>(DASHBOARD).expect("the dashboard is JSON");
    let asked = names(DASHBOARD);
    assert!(asked.is_subset(&exported), "{:?}", asked.difference(&exported).collect::<Vec<_>>());
    let shown: BTreeSet<String> = asked.iter().map(|name| family(name).to_owned()).collect();
    assert_eq!(shown, listed, "the dashboard shows all of them");
    // Few values for each label, and no key among them.
    assert!(!text.contains("demo:"), "{text}");
    let series = samples(&text).filter(|(name, ..)| !name.ends_with("_bucket")).count();
    assert!(series < 150, "{series} series\n{text}");
}
