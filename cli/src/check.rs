//! `check`: what makes locks unsafe or slow on this server, and what mends it.

use serde_json::{Value, json};
use syncguard::{Finding, Severity};

use crate::args::At;
use crate::connection::look;
use crate::failure::Ended;
use crate::output::{print, print_json, printable};

/// Something is unsafe.
const UNSAFE: u8 = 1;

pub(crate) fn check(at: &At) -> Ended {
    let findings = look(at)?.operator().check()?;
    if at.json {
        print_json(&Value::Array(findings.iter().map(json).collect()))?;
    } else {
        for finding in &findings {
            tell(finding)?;
        }
        print(&summary(&findings))?;
    }
    Ok(if of(&findings, Severity::Unsafe) > 0 { UNSAFE } else { 0 })
}

fn json(finding: &Finding) -> Value {
    json!({
        "severity": finding.severity.as_str(),
        "code": finding.code,
        "seen": finding.seen,
        "meaning": finding.meaning,
        "mend": finding.mend,
    })
}

fn tell(finding: &Finding) -> Result<(), crate::failure::Failure> {
    print(&format!("{:<7} {}: {}", finding.severity, finding.code, printable(&finding.seen)))?;
    print(&format!("        {}", printable(&finding.meaning)))?;
    print(&format!("        mend with: {}", printable(&finding.mend)))
}

fn of(findings: &[Finding], severity: Severity) -> usize {
    findings.iter().filter(|finding| finding.severity == severity).count()
}

fn summary(findings: &[Finding]) -> String {
    let [bad, slow, notes] =
        [Severity::Unsafe, Severity::Slow, Severity::Note].map(|severity| of(findings, severity));
    match (bad, slow + notes) {
        (0, 0) => "nothing to mend".to_owned(),
        (0, _) => format!("nothing unsafe; {slow} slow, {notes} to note"),
        (_, _) => format!("{bad} UNSAFE, {slow} slow, {notes} to note"),
    }
}
