//! What a client asks, by the messages that it sends.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;

use crate::frames::{read_frame, text_at};

/// Follows the name of a statement that the driver has bound, where rules see it.
pub const BOUND: &str = " by Bind";

/// What one connection has prepared, to know what it calls.
#[derive(Default)]
pub(super) struct Queries {
    started: bool,
    /// The texts of simple queries that prepare statements.
    prepared: String,
    /// By the driver's names of statements: ours, or the text.
    parsed: HashMap<String, String>,
}

impl Queries {
    /// The next message, or all of them up to a `Sync`, and what it says if it is a query.
    pub(super) fn read(&mut self, client: &mut TcpStream) -> io::Result<(Vec<u8>, Option<String>)> {
        let mut all = read_frame(client, !self.started)?;
        if !std::mem::replace(&mut self.started, true) {
            return Ok((all, None));
        }
        if all.first() == Some(&b'Q') {
            let sql = text_at(&all, 5);
            if sql.contains("PREPARE ") {
                self.prepared.push_str(&sql);
            }
            return Ok((all, Some(sql)));
        }
        let mut says = None;
        let mut frame = all.clone();
        loop {
            let name = text_at(&frame, 5);
            match frame.first() {
                Some(b'P') => {
                    let sql = text_at(&frame, 6 + name.len());
                    says = Some(format!("Parse {sql}"));
                    let called = self.name_of(&sql).unwrap_or(sql);
                    self.parsed.insert(name, called);
                }
                Some(b'B') => {
                    let statement = text_at(&frame, 6 + name.len());
                    let called = self.parsed.get(&statement).map_or("", String::as_str);
                    says = Some(format!("EXECUTE {called}{BOUND}"));
                }
                Some(b'D' | b'E' | b'C') => {}
                _ => return Ok((all, says)),
            }
            frame = read_frame(client, false)?;
            all.extend_from_slice(&frame);
        }
    }

    /// The name under which this text was prepared by a simple query.
    pub(super) fn name_of(&self, sql: &str) -> Option<String> {
        let (before, _) = self.prepared.split_once(&format!(" AS {sql}"))?;
        let (_, name) = before.rsplit_once("PREPARE ")?;
        Some(name.split('(').next().unwrap_or(name).to_owned())
    }
}
