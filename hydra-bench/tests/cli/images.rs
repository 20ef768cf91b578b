//! Image classification: training, ranking by accuracy, evaluation, cuts, resuming and refusals.

use crate::common::{fails, hydra, json, notes, results, says, spawn, text, wait_for};
use image::{GrayImage, ImageBuffer, Luma, Rgb, RgbImage};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use tempfile::TempDir;

const CLASSES: [&str; 3] = ["blue", "green", "red"];

/// An image in the colour of its class, with varying brightness.
fn image(class: usize, index: u32) -> RgbImage {
    RgbImage::from_fn(20, 12, |x, y| {
        let noise = (x * 7 + y * 13 + index * 29) % 90;
        let mut pixel = [noise as u8; 3];
        pixel[2 - class] = (160 + noise) as u8;
        Rgb(pixel)
    })
}

/// Writes a folder with `count` images for each class, drawn as the classes that `drawn` maps to.
fn draw(split: &Path, count: u32, first: u32, drawn: impl Fn(usize, u32) -> usize) {
    for (class, name) in CLASSES.iter().enumerate() {
        let folder = split.join(name);
        fs::create_dir_all(&folder).unwrap();
        for index in 0..count {
            image(drawn(class, index), first + index).save(folder.join(format!("{index}.png"))).unwrap();
        }
    }
}

fn own(class: usize, _: u32) -> usize {
    class
}

/// Images of three colours in three splits.
static COLOURS: LazyLock<(TempDir, String)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    for (split, count, first) in [("train", 24, 0), ("validation", 8, 100), ("test", 8, 200)] {
        draw(&root.path().join(split), count, first, own);
    }
    let path = root.path().to_str().unwrap().to_owned();
    (root, path)
});

/// The report of a run of the small vision transformer on the colours.
fn run(arguments: &str, out: &Path) -> (Value, String) {
    let run = format!("{arguments} --model vit-tiny --data {} --out {}", COLOURS.1, out.display());
    let said = says(&run.split_whitespace().collect::<Vec<_>>());
    (json(&out.join("report.json")), said)
}

fn task<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["tasks"].as_array().unwrap().iter().find(|task| task["name"] == name).unwrap()
}

/// The evaluation of a model on the test images of a directory.
fn evaluated(model: &Path, data: &Path) -> Value {
    let paths = ["--model", model.to_str().unwrap(), "--data", data.to_str().unwrap()];
    serde_json::from_str(&says(&[&["eval", "--json"][..], &paths].concat())).unwrap()
}

#[test]
fn classes_are_learned_and_ranked_by_accuracy() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let select =
        "select --batch 8 --lr 1e-6,1e-3 --epochs 5 --eval-every 20 --devices cpu:2x1 --device-memory 64MiB";
    let (report, said) = run(select, &out);
    let (best, other) = (task(&report, "lr1e-3"), task(&report, "lr1e-6"));
    assert_eq!(best["test"]["metrics"]["accuracy"], 1.0, "{best}");
    let few = other["test"]["metrics"]["accuracy"].as_f64().unwrap();
    assert_eq!(few, (few * 24.0).round() / 24.0, "a count of right answers");
    assert_eq!((&best["unit"], &best["units"]), (&"images".into(), &(5 * 72).into()));
    assert!(best["test"].get("perplexity").is_none() && best["validation"]["predicted_tokens"] == 24);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("validation accuracy") && !said.contains("ppl"), "{said}");
    assert!(lines[1].trim_start().starts_with("1  lr1e-3") && lines[1].contains("100.00%"), "{said}");
    assert!(said.contains(" images/s,") && !said.contains("tokens"), "{said}");
    let file = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    assert!(file("leaderboard.svg").contains("Validation accuracy by settings"));
    assert!(
        file("losses.svg").contains("by validation accuracy")
            && file("losses.svg").contains("images trained")
    );
    assert!(
        file("report.html").contains("validation accuracy")
            && file("metrics.jsonl").contains("\"accuracy\":")
    );
    assert!(says(&["report", out.to_str().unwrap()]).contains("validation accuracy"));

    let model = out.join("models/lr1e-3");
    let config = json(&model.join("config.json"));
    assert_eq!((&config["id2label"]["2"], &config["label2id"]["blue"]), (&"red".into(), &0.into()));
    assert_eq!(json(&model.join("preprocessor_config.json"))["size"]["width"], 32);
    let of_test = evaluated(&model, Path::new(&COLOURS.1));
    assert_eq!((&of_test["metrics"]["accuracy"], &of_test["images"]), (&1.0.into(), &24.into()));
    // By hand: of the six images of each class, the last two have another colour.
    let wrong = root.path().join("wrong");
    draw(&wrong.join("test"), 6, 300, |class, index| if index < 4 { class } else { (class + 1) % 3 });
    assert_eq!(evaluated(&model, &wrong)["metrics"]["accuracy"], 12.0 / 18.0);
    // Class indices are the model's, also if some classes are not in the data.
    fs::remove_dir_all(wrong.join("test/blue")).unwrap();
    let paths = ["eval", "--model", model.to_str().unwrap(), "--data", wrong.to_str().unwrap()];
    let said = says(&paths);
    assert!(said.contains(", accuracy 66.67%, f1_macro ") && said.ends_with(" over 12 images\n"), "{said}");
}

#[test]
fn a_model_in_shards_has_the_bits_of_one_that_is_whole() {
    let root = TempDir::new().unwrap();
    let train = "train --batch 8 --lr 1e-3 --steps 6 --eval-every 3";
    let whole =
        run(&format!("{train} --devices cpu:1x2 --device-memory 256MiB"), &root.path().join("whole")).0;
    let kept = |report: &Value| results(&report["tasks"][0]);
    assert_eq!(whole["tasks"][0]["shards"], 1);
    let settings = [
        ("--devices cpu:1x1 --device-memory 64MiB --cuts 1,2,3,4", 5),
        ("--devices cpu:2x1 --device-memory 64MiB --cuts 1,3,4", 4),
    ];
    for (place, (settings, shards)) in settings.into_iter().enumerate() {
        let cut = run(&format!("{train} {settings}"), &root.path().join(place.to_string())).0;
        assert!(
            cut["tasks"][0]["shards"].as_u64() >= Some(shards),
            "{settings}: {}",
            cut["tasks"][0]["shards"]
        );
        assert_eq!(kept(&cut), kept(&whole), "{settings}");
    }
}

#[test]
fn adapters_of_a_vision_transformer_have_one_base_and_the_bits_of_each_alone() {
    let root = TempDir::new().unwrap();
    let base = run("train --batch 8 --lr 1e-3 --epochs 3 --devices cpu:1x2", &root.path().join("base")).0;
    let base = base["tasks"][0]["model_dir"].as_str().unwrap().to_owned();
    let tuned = |name: &str, more: &str| {
        let out = root.path().join(name);
        let of = format!("select --batch 8 --lr 3e-3 --steps 4 --lora-dropout 0.1 --model {base} {more}");
        let run = format!("{of} --data {} --out {}", COLOURS.1, out.display());
        says(&run.split_whitespace().collect::<Vec<_>>());
        (json(&out.join("report.json")), out)
    };
    let (grid, _) = tuned("grid", "--lora 2,4 --devices cpu:2x1 --device-memory 64MiB --cuts 1,3");
    let (alone, out) = tuned("alone", "--lora 4 --devices cpu:1x2 --device-memory 256MiB");
    let (found, expected) = (task(&grid, "r4"), &alone["tasks"][0]);
    for key in ["weights_sha256", "losses", "test"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    let adapter = out.join("models/b8-lr3e-3-r4");
    let config = json(&adapter.join("adapter_config.json"));
    assert_eq!(config["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
    let with =
        ["eval", "--json", "--model", &base, "--data", &COLOURS.1, "--adapter", adapter.to_str().unwrap()];
    let said: Value = serde_json::from_str(&says(&with)).unwrap();
    let near = |found: &Value, expected: &Value| {
        let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
        assert!((found - expected).abs() <= 1e-5 * expected, "{found} for {expected}");
    };
    near(&said["loss"], &expected["test"]["loss"]);
    let (merged, out) = tuned("merged", "--lora 4 --lora-targets q_proj,value --merge --devices cpu:1x1");
    assert_eq!(
        merged["tasks"][0]["weights_sha256"], expected["weights_sha256"],
        "a name is as good as the other"
    );
    let whole = evaluated(&out.join("models/b8-lr3e-3-r4"), Path::new(&COLOURS.1));
    near(&whole["loss"], &expected["test"]["loss"]);
}

#[test]
fn a_killed_run_on_images_goes_on() {
    let root = TempDir::new().unwrap();
    let train = "train --batch 8 --lr 1e-3 --steps 30 --cuts 2,3 --devices cpu:1x1 --device-memory 64MiB";
    let whole = run(train, &root.path().join("whole")).0;
    let killed = root.path().join("killed");
    let slow = format!(
        "{train} --model vit-tiny --data {} --out {} --checkpoint-every 2 --link 20MiB/s",
        COLOURS.1,
        killed.display()
    );
    let mut child = spawn(&slow.split_whitespace().collect::<Vec<_>>(), Stdio::piped());
    let events = || fs::read_to_string(killed.join("metrics.jsonl")).unwrap_or_default();
    wait_for(|| events().matches("\"checkpoint\"").count() >= 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let said = text(&hydra(&["report", killed.to_str().unwrap()]).output().unwrap().stdout);
    assert!(said.contains("continue it with") && said.contains("initial accuracy"), "{said}");
    let output = hydra(&["resume", killed.to_str().unwrap(), "--link", "8GiB/s"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let gone_on = json(&killed.join("report.json"));
    for key in ["weights_sha256", "losses", "test"] {
        assert_eq!(gone_on["tasks"][0][key], whole["tasks"][0][key], "{key}");
    }
}

#[test]
fn a_directory_with_training_images_alone_is_parted_and_that_is_said() {
    let root = TempDir::new().unwrap();
    draw(&root.path().join("train"), 10, 0, own);
    let (data, out) = (root.path().to_str().unwrap(), root.path().join("run"));
    let run = "train --model vit-tiny --batch 8 --steps 1 --device-memory 64MiB --data";
    let run = run.split_whitespace().chain([data, "--out", out.to_str().unwrap()]);
    let output = hydra(&run.collect::<Vec<_>>()).output().unwrap();
    let said = notes(&text(&output.stderr));
    assert!(
        said.starts_with("note: ") && said.contains("the last tenth of each class is used for test"),
        "{said}"
    );
    let report = json(&out.join("report.json"));
    assert_eq!(report["tasks"][0]["test"]["predicted_tokens"], 3);
}

/// Copies images and introduces an error.
fn spoiled(root: &Path, name: &str, spoil: impl Fn(&Path)) -> String {
    let data = root.join(name);
    for split in ["train", "validation", "test"] {
        draw(&data.join(split), 2, 0, own);
    }
    spoil(&data);
    data.to_str().unwrap().to_owned()
}

#[test]
fn what_is_wrong_with_images_is_named_with_the_file() {
    let root = TempDir::new().unwrap();
    let at = |name: &str, spoil: &dyn Fn(&Path)| spoiled(root.path(), name, spoil);
    let broken = |data: &Path| {
        let file = data.join("test/red/1.png");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    };
    let wide = |data: &Path| {
        ImageBuffer::from_pixel(4, 4, Luma([900_u16])).save(data.join("train/red/0.png")).unwrap();
    };
    let cases: [(String, &[&str]); 6] = [
        (at("broken", &broken), &["test/red/1.png", "could not be decoded"]),
        (at("wide", &wide), &["train/red/0.png", "16-bit greyscale", "convert it"]),
        (
            at("empty", &|data| fs::create_dir(data.join("train/white")).unwrap()),
            &["train/white", "has no PNG or JPEG images"],
        ),
        (
            at("other", &|data| fs::rename(data.join("test/red"), data.join("test/pink")).unwrap()),
            &["test/pink", "is not in the training data", "blue, green, red"],
        ),
        (
            root.path().join("nowhere").to_str().unwrap().to_owned(),
            &["no images in", "nowhere", "train/cat/1.png"],
        ),
        (
            at("text", &|data| fs::write(data.join("train/red/1.png"), "red").unwrap()),
            &["train/red/1.png", "not a PNG or JPEG file"],
        ),
    ];
    for (data, parts) in cases {
        fails(&["select", "--model", "vit-tiny", "--data", &data], 1, parts);
    }
    // Greyscale and transparent images are converted.
    let grey = at("grey", &|data| {
        GrayImage::from_pixel(9, 9, Luma([7])).save(data.join("train/red/0.png")).unwrap();
        let clear = image::RgbaImage::from_pixel(9, 9, image::Rgba([7, 8, 9, 0]));
        clear.save(data.join("train/red/1.png")).unwrap();
    });
    says(&[
        "train",
        "--model",
        "vit-tiny",
        "--data",
        &grey,
        "--batch",
        "2",
        "--dry-run",
        "--device-memory",
        "64MiB",
    ]);
}

/// A fixture of `hydra-models`.
fn fixture(name: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hydra-models/tests/fixtures");
    fs::read(root.join(name)).unwrap()
}

#[test]
fn images_that_cannot_be_decoded_are_refused_and_files_that_are_none_are_counted() {
    let root = TempDir::new().unwrap();
    let with = |name: &str, file: &str, bytes: &[u8]| {
        spoiled(root.path(), name, |data| fs::write(data.join(file), bytes).unwrap())
    };
    let whole = fixture("jpeg/420.jpg");
    let early = with("early", "train/red/x.jpg", &whole[..whole.len() * 3 / 10]);
    let run = |data: &str| ["train", "--model", "vit-tiny", "--data", data, "--dry-run"].map(str::to_owned);
    let refused = |data: &str, more: &[&str], parts: &[&str]| {
        let run = run(data);
        fails(&[&run.iter().map(String::as_str).collect::<Vec<_>>()[..], more].concat(), 1, parts);
    };
    refused(&early, &[], &["train/red/x.jpg` could not be decoded", "the file is truncated"]);
    let bomb = with("bomb", "train/red/bomb.png", &fixture("png/bomb.png"));
    let parts = ["bomb.png`", "60000 by 60000 pixels", "takes 10.06 GiB", "64.00 MiB are available"];
    refused(&bomb, &["--host-memory", "64MiB", "--device-memory", "64MiB"], &parts);
    let heic = with("heic", "test/red/x.heic", b"no image");
    let output = hydra(&run(&heic).each_ref().map(String::as_str)).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("note: 1 file of `") && said.contains("1 .heic, such as `"), "{said}");
}

#[test]
fn models_and_data_of_different_kinds_are_told_so() {
    let root = TempDir::new().unwrap();
    let vit = |more: &[&'static str]| [&["train", "--model", "vit-tiny"][..], more].concat();
    fails(&vit(&[]), 2, &["`vit-tiny` reads images", "`builtin`"]);
    fails(&["train", "--data", &COLOURS.1], 2, &["`bytes-tiny` reads tokens", &COLOURS.1, "images"]);
    let on_colours = |more: &[&'static str]| [&vit(&["--data", &COLOURS.1])[..], more].concat();
    fails(&on_colours(&["--context", "8"]), 2, &["--context applies to token data"]);
    fails(&on_colours(&["--pack"]), 2, &["--pack applies to token data"]);
    let targets = ["--lora", "4", "--lora-targets", "c_attn"];
    fails(&on_colours(&targets), 1, &["`c_attn`, expected some of q_proj, k_proj, v_proj"]);
    fails(&["step", "--model", "vit-tiny"], 2, &["is an image model"]);
    fails(&["step", "--model", "bytes-bert-tiny"], 2, &["is a classifier of texts"]);
    // A model with weights and data with other classes: the error names both.
    let out: PathBuf = root.path().join("run");
    run("train --batch 8 --steps 1 --device-memory 64MiB", &out);
    let model = out.join("models/b8-lr3e-4");
    let other = spoiled(root.path(), "other", |data| {
        for split in ["train", "validation", "test"] {
            fs::rename(data.join(split).join("red"), data.join(split).join("pink")).unwrap();
        }
    });
    let arguments = ["train", "--model", model.to_str().unwrap(), "--data", &other];
    fails(&arguments, 1, &["3 classes (blue, green, red)", "3 (blue, green, pink)"]);
}
