//! `cargo xtask dependencies`: whether every package that a program of ours is made of, or made with, has a licence that we accept and
//! comes from the public registry, and whether ours ask for versions.
//!
//! Known vulnerabilities are not looked up: their database is not everywhere within reach. `cargo deny check advisories` does it.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {}

/// The machines that programs are built for.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// What any package may have.
const LICENSES: [&str; 9] =
    ["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT-0", "Unicode-3.0", "Unlicense", "Zlib"];

/// An exception that adds a right.
const EXCEPTION: &str = "Apache-2.0 WITH LLVM-exception";

/// One more licence of one package: it makes the header of the C interface, and nothing of it is in what users get.
const OF_ONE: (&str, &str) = ("cbindgen", "MPL-2.0");

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub fn run(_: &Args) -> Result<(), String> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let (mut seen, mut faults) = (BTreeSet::new(), BTreeSet::new());
    for target in TARGETS {
        let output = Command::new(env!("CARGO"))
            .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", target, "--manifest-path"])
            .arg(&manifest)
            .stderr(std::process::Stdio::inherit())
            .output()
            .map_err(|e| format!("cargo metadata: {e}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata: {}", output.status));
        }
        let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
        let used: BTreeSet<&str> = list(&metadata["resolve"]["nodes"]).filter_map(|node| node["id"].as_str()).collect();
        for package in list(&metadata["packages"]).filter(|package| used.contains(text(&package["id"]))) {
            seen.insert(text(&package["id"]).to_owned());
            faults.extend(faults_of(package));
        }
    }
    println!("{} packages, for {}", seen.len(), TARGETS.join(" and "));
    match faults.is_empty() {
        true => Ok(()),
        false => Err(faults.into_iter().collect::<Vec<_>>().join("\n       ")),
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What is wrong with a package of `cargo metadata`.
fn faults_of(package: &Value) -> Vec<String> {
    let name = text(&package["name"]);
    let of = format!("{name} {}", text(&package["version"]));
    let mut faults = Vec::new();
    let license = text(&package["license"]);
    if let Err(reason) = accepted(name, license) {
        faults.push(format!("{of}: {reason}"));
    }
    match package["source"].as_str() {
        Some(REGISTRY) => {}
        Some(other) => faults.push(format!("{of}: comes from {other}, not from crates.io")),
        // Ours: what has no path comes from the registry, where any version may be a malicious one.
        None => faults.extend(
            list(&package["dependencies"])
                .filter(|dependency| dependency["path"].is_null() && text(&dependency["req"]) == "*")
                .map(|dependency| format!("{of}: takes any version of {}", text(&dependency["name"]))),
        ),
    }
    faults
}

/// Whether `license`, an SPDX expression, can be met by what we accept.
fn accepted(name: &str, license: &str) -> Result<(), String> {
    // `MIT/Apache-2.0`, as old packages have it, is an OR.
    let expression = spdx::Expression::parse_mode(license, spdx::ParseMode::LAX)
        .map_err(|e| format!("its licence is no SPDX expression: {license:?}: {}", e.reason))?;
    let accepts = |required: &spdx::LicenseReq| {
        let required = required.to_string();
        LICENSES.contains(&required.as_str()) || required == EXCEPTION || (name, required.as_str()) == OF_ONE
    };
    match expression.evaluate(accepts) {
        true => Ok(()),
        false => Err(format!("its licence is {license}, of which none is in xtask/src/dependencies.rs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn licences_are_accepted_as_their_expressions_say() {
        for license in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "GPL-3.0-only OR MIT",
            "(MIT OR GPL-2.0-or-later) AND Unicode-3.0",
        ] {
            assert_eq!(accepted("any", license), Ok(()), "{license}");
        }
        for license in ["", "GPL-3.0-only", "MIT AND GPL-2.0-or-later", "GPL-3.0 WITH LLVM-exception", "our own"] {
            assert!(accepted("any", license).is_err(), "{license}");
        }
        assert!(accepted("any", "MPL-2.0").is_err());
        assert_eq!(accepted("cbindgen", "MPL-2.0"), Ok(()));
    }

    #[test]
    fn packages_come_from_the_registry_and_ours_name_versions() {
        let package = |source: Value, requirement: &str| {
            let dependencies = json!([{"name": "b", "req": requirement}, {"name": "c", "req": "*", "path": "/c"}]);
            faults_of(&json!({"name": "a", "version": "1.0.0", "license": "MIT", "source": source,
                "dependencies": dependencies}))
        };
        assert!(package(json!(REGISTRY), "*").is_empty());
        assert!(package(Value::Null, "^1").is_empty());
        assert_eq!(package(Value::Null, "*"), ["a 1.0.0: takes any version of b"]);
        assert_eq!(package(json!("git+https://example.org/a"), "^1").len(), 1);
    }
}
