//! `halfbyte verify`: whether two checkpoints stand for the same numbers.

use crate::app::App;
use crate::escape::{escaped, path};
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::open;
use crate::progress::{Progress, Unit};
use halfbyte_checkpoint::{Verification, verify};
use serde::Serialize;
use std::path::PathBuf;

/// Compare what two checkpoints stand for, number by number. Exit status 1 if they differ.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A model.
    a: PathBuf,
    /// The model to compare it with.
    b: PathBuf,
}

#[derive(Serialize)]
struct Verified {
    a: PathBuf,
    b: PathBuf,
    equal: bool,
    #[serde(flatten)]
    found: Verification,
}

/// Differences that are listed for people.
const LISTED: usize = 10;

/// Compares.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let progress = Progress::new(app, "comparing", Unit::Things("tensors"));
    let cooperate = interrupt::cooperate();
    let found = verify(&a, &b, &mut |_, done, total| {
        progress.at(done as u64, total as u64);
        !interrupt::cancelled()
    })?;
    drop((cooperate, progress));
    let result = Verified { a: args.a.clone(), b: args.b.clone(), equal: found.equal(), found };
    app.result(&result, human)?;
    if result.equal {
        return Ok(());
    }
    let found = &result.found;
    Err(Failure::new(
        Exit::No,
        format!("{} and {} differ", result.a.display(), result.b.display()),
        format!(
            "{} of {} tensors hold other numbers, {} are in the first only, {} in the second only",
            found.differing.len(),
            found.compared,
            found.only_in_first.len(),
            found.only_in_second.len()
        ),
        "--json lists every difference",
    ))
}

fn human(r: &Verified) -> String {
    let Verification { compared, elements, differing, only_in_first, only_in_second } = &r.found;
    let mut out = match r.equal {
        true => format!("equal: {compared} tensors, {elements} numbers\n"),
        false => format!("different: {} of {compared} tensors\n", differing.len()),
    };
    for d in differing.iter().take(LISTED) {
        let name = escaped(&d.name);
        out += &match (d.largest, d.at) {
            (Some(largest), Some((at, a, b))) => {
                format!("  {name}: {} numbers, by up to {largest:.3e} (number {at}: {a} and {b})\n", d.elements)
            }
            _ => format!("  {name}: shape {:?} and {:?}\n", d.shapes[0], d.shapes[1]),
        };
    }
    if differing.len() > LISTED {
        out += &format!("  and {} more\n", differing.len() - LISTED);
    }
    for (names, model) in [(only_in_first, &r.a), (only_in_second, &r.b)] {
        for name in names.iter().take(LISTED) {
            out += &format!("  {}\n", format_args!("{}: only in {}", escaped(name), path(model)));
        }
    }
    out
}
