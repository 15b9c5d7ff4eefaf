//! What is seen in a terminal: a real one, of tmux.

use std::process::Command;

use syncguard::PgLockClient;

use crate::Done;
use crate::program::SYNCGUARD;
use crate::support::wait::poll;
use crate::support::{self, LIMIT, TestSchema, unique};

/// A terminal with a shell in it, of a tmux server of its own.
struct Terminal(String);

impl Terminal {
    fn open(schema: &TestSchema) -> Self {
        let terminal = Self(format!("syncguard_{}", unique()));
        let url = format!("SYNCGUARD_URL={}", schema.url());
        let shell = "exec env PS1='$ ' LC_ALL=C.UTF-8 sh";
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "110", "-y", "12", "-e", &url, shell]);
        terminal.wait_for("the shell's prompt", |screen| screen.contains('$'));
        terminal
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux").env_remove("TMUX").args(["-u", "-L", &self.0]).args(args).output();
        let output = output.expect("tmux is installed (scripts/test does that): apt-get install tmux");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("a screen is text")
    }

    fn enter(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.press("Enter");
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    #[track_caller]
    fn wait_for(&self, what: &str, seen: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        let found = poll(LIMIT, || {
            screen = self.screen();
            seen(&screen)
        });
        assert!(found, "waited in vain until the terminal shows {what}; it shows:\n{screen}");
        screen
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.0, "kill-server"]).output();
    }
}

#[test]
fn a_wait_says_who_has_the_lock_and_how_long_it_goes_on() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let guard = client.lock("key")?;
    let terminal = Terminal::open(&schema);
    terminal.enter(&format!("{SYNCGUARD} run --key key --wait 5m -- echo started; echo ended $?"));
    terminal.wait_for("who has the lock", |screen| {
        screen.contains("waiting for key: held for ")
            && screen.contains(", fencing token 1; ")
            && screen.contains("so far, gives up in 4m ")
    });
    guard.release()?;
    let screen = terminal.wait_for("the end", |screen| screen.contains("\nended 0"));
    assert!(screen.contains("\nstarted\n") && !screen.contains("waiting for"), "the line has gone: {screen}");
    Ok(())
}

#[test]
fn ctrl_c_ends_a_wait_and_reaches_a_program() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let guard = client.lock("key")?;
    let terminal = Terminal::open(&schema);
    terminal.enter(&format!("{SYNCGUARD} run --key key -- true; echo ended $?"));
    terminal.wait_for("the wait", |screen| screen.contains("Ctrl-C gives up"));
    terminal.press("C-c");
    terminal.wait_for("the end", |screen| screen.contains("\nended 130"));
    guard.release()?;
    let program = "trap \"echo heard; exit 9\" INT; echo started; while :; do sleep 0.05; done";
    terminal.enter(&format!("clear; {SYNCGUARD} run --key key -- sh -c '{program}'; echo ended $?"));
    terminal.wait_for("the program", |screen| screen.contains("\nstarted") || screen.starts_with("started"));
    terminal.press("C-z");
    terminal.press("C-c");
    terminal.wait_for("the program's own end", |screen| screen.contains("heard\nended 9"));
    assert!(!client.is_locked("key")?);
    Ok(())
}

#[test]
fn watch_shows_what_is_held_as_it_comes_and_goes() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let [deploy, report] = [client.lock("app:deploy")?, client.lock("report\u{1b}[2J")?];
    let permit = client.semaphore("images", 3)?.acquire()?;
    let terminal = Terminal::open(&schema);
    terminal.enter(&format!("{SYNCGUARD} watch --every 100ms; echo ended $?"));
    terminal.wait_for("what is held, with bars", |screen| {
        let row =
            |name: &str, part: &str| screen.lines().any(|line| line.starts_with(name) && line.contains(part));
        screen.starts_with("syncguard: 3 held, 0 waiting")
            && row("KEY ", "TTL LEFT")
            && row("app:deploy ", "█")
            && row("images (permit ", "█")
            && row("report", "█")
    });
    // Another process waits.
    let other = PgLockClient::connect(&schema.url())?;
    std::thread::scope(|scope| -> Done {
        let waiting = scope.spawn(|| other.lock("app:deploy").map(drop));
        terminal.wait_for("who waits", |screen| {
            screen.starts_with("syncguard: 3 held, 1 waiting")
                && screen
                    .lines()
                    .any(|line| line.starts_with("app:deploy ") && line.trim_end().ends_with(" 1"))
        });
        deploy.release()?;
        waiting.join().expect("it does not panic")?;
        Ok(())
    })?;
    report.release()?;
    permit.release()?;
    terminal.wait_for("that nothing is held", |screen| screen.starts_with("syncguard: 0 held"));
    terminal.press("q");
    terminal.wait_for("the shell again", |screen| screen.contains("echo ended $?\nended 0"));
    Ok(())
}

#[test]
fn watch_gives_the_terminal_back_when_it_is_ended() -> Done {
    let schema = support::schema();
    PgLockClient::connect(&schema.url())?;
    let terminal = Terminal::open(&schema);
    for (how, what) in [("C-c", "Ctrl-C"), ("", "a signal")] {
        terminal.enter(&format!("clear; sh -c 'echo $$ >/dev/null; exec {SYNCGUARD} watch'; echo ended $?"));
        terminal.wait_for("the table", |screen| screen.starts_with("syncguard: 0 held"));
        if how.is_empty() {
            let pane = terminal.tmux(&["list-panes", "-F", "#{pane_pid}"]);
            let found = Command::new("pgrep").args(["-P", pane.trim()]).output()?;
            let pid: u32 = String::from_utf8(found.stdout)?.trim().parse()?;
            crate::program::signal(pid, "TERM");
        } else {
            terminal.press(how);
        }
        terminal.wait_for(&format!("the end by {what}"), |screen| screen.contains("ended 0"));
        terminal.enter("clear; stty -a | grep -ow -e '-*icanon' -e '-*echo'");
        terminal.wait_for("a terminal as it was", |screen| {
            let lines: Vec<&str> = screen.lines().map(str::trim_end).collect();
            lines.contains(&"icanon") && lines.contains(&"echo") && !screen.contains("\n-")
        });
    }
    Ok(())
}

#[test]
fn a_program_that_asks_the_terminal_does_not_hang_with_the_lock() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let terminal = Terminal::open(&schema);
    for (trap, code) in [("", 143), ("trap \"\" TERM;", 137)] {
        let program = format!("{trap} while :; do read answer </dev/tty; done");
        terminal.enter(&format!("clear; {SYNCGUARD} run --key key -- sh -c '{program}'; echo ended $?"));
        let screen = terminal.wait_for("the end", |screen| screen.contains(&format!("\nended {code}")));
        assert!(screen.contains("asks for input at the terminal"), "{screen}");
    }
    assert!(!client.is_locked("key")?);
    Ok(())
}
