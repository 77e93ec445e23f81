//! `halfbyte verify`: whether two checkpoints stand for the same numbers.

use crate::app::App;
use crate::args::HintArgs;
use crate::escape::{escaped, path};
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::arch::refuse_idle;
use crate::model::{is_parts, open, open_any};
use crate::progress::{Progress, Unit};
use crate::text::several;
use halfbyte_checkpoint::verify::OnTensor;
use halfbyte_checkpoint::{Part, Verification, Weights, verify, verify_parts};
use halfbyte_llm::{Config, shard};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Compare what two checkpoints stand for, number by number. Exit status 1 if they differ.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A model, or a folder with the parts of ranks (`convert --tp`), which together must be the other one.
    a: PathBuf,
    /// The model to compare it with.
    b: PathBuf,
    #[command(flatten)]
    hint: HintArgs,
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
    if is_parts(&args.b) {
        return Err(Failure::usage(
            format!("{} holds the parts of ranks", args.b.display()),
            "it is compared with the model that they are of, which comes second",
            "give the parts first, then the model",
        ));
    }
    let noted = |model: &Path| {
        let weights = open_any(model, args.hint.into())?;
        for finding in weights.findings().iter().chain(&weights.findings_of_modules()) {
            app.note(&format!("note: {}: {finding}", model.display()));
        }
        Ok::<_, Failure>(weights)
    };
    let b = noted(&args.b)?;
    let progress = Progress::new(app, "comparing", Unit::Things("tensors"));
    let cooperate = interrupt::cooperate();
    let mut on_tensor = |_: &str, done: usize, total: usize| {
        progress.at(done as u64, total as u64);
        !interrupt::cancelled()
    };
    let found = match is_parts(&args.a) {
        true => {
            refuse_idle(args.hint.into(), &[&b])?;
            of_parts(&args.a, &b, &mut on_tensor)?
        }
        false => {
            let a = noted(&args.a)?;
            refuse_idle(args.hint.into(), &[&a, &b])?;
            verify(&a, &b, &mut on_tensor)?
        }
    };
    drop((cooperate, progress));
    if found.compared == 0 && found.equal() {
        return Err(Failure::new(
            Exit::Input,
            "there is nothing to compare",
            format!("neither {} nor {} holds a tensor", args.a.display(), args.b.display()),
            "`halfbyte inspect MODEL` lists the tensors of each",
        ));
    }
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

/// The parts of all ranks against the model that they are of.
fn of_parts(folder: &Path, whole: &Weights, on_tensor: &mut OnTensor<'_>) -> Result<Verification> {
    let refuse = |why: String| {
        let help = "give a folder that `halfbyte convert --tp` has written, and the model that it was written from";
        Failure::new(Exit::Input, format!("{} is not the parts of a model", folder.display()), why, help)
    };
    let part_of = |weights: &Weights| weights.part()?.ok_or_else(|| refuse("`rank-0` says no rank".to_owned()));
    let first = part_of(&open(&folder.join(Part::folder(0)))?)?;
    let cuts = shard::parts(&Config::from_weights(whole)?.spec, whole, first.size)?;
    let all = (0..first.size).map(|rank| open(&folder.join(Part::folder(rank)))).collect::<Result<Vec<_>>>()?;
    for (rank, weights) in all.iter().enumerate() {
        let got = part_of(weights)?;
        if got != (Part { rank, ..first.clone() }) {
            let name = Part::folder(rank);
            return Err(refuse(format!("`{name}` has the part of rank {} of {}, {}", got.rank, got.size, got.model)));
        }
    }
    let parts: Vec<_> = all.iter().zip(cuts).map(|(weights, (_, cuts))| (weights, cuts)).collect();
    Ok(verify_parts(&parts, whole, on_tensor)?)
}

fn human(r: &Verified) -> String {
    let Verification { compared, elements, differing, only_in_first, only_in_second } = &r.found;
    let mut out = match r.equal {
        true => format!("equal: {}, {}\n", several(*compared, "tensor"), several(*elements as usize, "number")),
        false => format!("different: {} of {}\n", differing.len(), several(*compared, "tensor")),
    };
    for d in differing.iter().take(LISTED) {
        let name = escaped(&d.name);
        out += &match (d.largest, d.at) {
            (Some(largest), Some((at, a, b))) => {
                let numbers = several(d.elements as usize, "number");
                format!("  {name}: {numbers}, by up to {largest:.3e} (number {at}: {a} and {b})\n")
            }
            _ => match d.types {
                Some([a, b]) => format!("  {name}: {a} {:?} and {b} {:?}\n", d.shapes[0], d.shapes[1]),
                None => format!("  {name}: shape {:?} and {:?}\n", d.shapes[0], d.shapes[1]),
            },
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
