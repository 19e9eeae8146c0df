"""The grammar of `flowalign.prompts.ocr`: symbol -> what may stand for it.

`{name}` in a text is a symbol of WORDS. Keys of TEXTS are kinds of target text; SCENES says which
kinds a scene can show. No quotes, apostrophes, inch marks or letters beyond a to z.
"""

from __future__ import annotations

# fmt: off
TEXTS: dict[str, str] = {  # phrases between semicolons
    "WORD": """
        {short}; {short}; {shout}; {shout}; {shout} {shout}; {noun}; {abstract}; {adjective};
        {place}
    """,
    "NOTICE": """
        No {gerund}; No {gerund} Here; No {gerund} or {gerund}; Please {please};
        Beware of {beast}; Mind the {noun}; Caution {adjective} {noun}; Quiet {gerund} Area;
        {crew} Only; {crew} Entrance; Closed on {weekday}; Open {weekday} at {hour}; Keep {keep};
        Reserved for {first}; {animal} Crossing; No {gerund} or {gerund} After {hour};
        Beware of {adjective} {beast}
    """,
    "SHOP": """
        {surname} {shop}; {adjective} {noun} {shop}; {noun} {shop}; The {adjective} {animal};
        {noun} and {noun}; {place} {shop}; {first} and Sons; {first} {shop};
        {colour} {animal} {shop}; The {adjective} {animal} {shop}; {surname} and {surname} {shop}
    """,
    "WAY": """
        {place} {n} Miles; {place} Next Left; {place} Straight Ahead; Exit {n}; Gate {letter}{n};
        Platform {n}; To the {noun}; {adjective} {noun} Trail; {place} Road; Detour to {place};
        Next Stop {place}; Welcome to {place}; Next Stop {place} {n} Miles;
        {place} and {place} Next Left
    """,
    "SLOGAN": """
        {verb} {adverb}; {verb} Your {noun}; {verb} the {noun}; {verb} More {verb} Less;
        Born to {verb}; Dare to {verb}; {verb} for {abstract}; {abstract} Starts Here;
        {abstract} Not {abstract}; More {plural} Less {plural}; {adjective} {plural} Only;
        Save the {plural}; {plural} Before {plural}; Just {verb} It; Let Us {verb} {adverb};
        {verb} {adverb} and {verb} {adverb}; {verb} With {abstract} and {abstract}
    """,
    "PRICE": """
        {food} {n} Dollars; {food} Two for One; {percent} Percent Off {food}; Fresh {food} Daily;
        Free {food} Today; {adjective} {food} {n} Cents; Half Price {food};
        {adjective} {food} and {food}; Buy {food} Get Free {food};
        {percent} Percent Off {adjective} {food}
    """,
    "STATUS": """
        Battery {percent} Percent; Flight {number} {delay}; Error {number}; Level {n} Complete;
        Game Over {first}; Score {n} to {n}; New Message From {first}; {weekday} {n} Degrees;
        Loading {noun}; {noun} Not Found; System {delay}; Track {n} {delay}; Lap {n} of {n};
        {n} New {plural}; Press {letter} to {verb}; {place} Flight {number} {delay};
        {n} New Messages From {first}
    """,
    "TITLE": """
        The {adjective} {noun}; The {animal} and the {noun}; {noun} of {abstract};
        {noun} in the {noun}; One {noun} for {first}; Return to {place}; Last {noun} to {place};
        {n} {plural} of {place}; {first} and the {animal}; {adjective} {abstract};
        Songs of {place}; Beyond the {noun}; The {surname} {noun}; {month} in {place};
        The {adjective} {noun} of {place}; The {noun} of the {adjective} {animal}
    """,
    "DATE": """
        {month} {day}; {month} {day} {year}; Established {year}; Since {year}; {season} {year};
        Class of {year}; {weekday} {hour}; {season} Fair {year}; {place} {year};
        {weekday} {month} {day}; {season} {noun} Fair {month} {day};
        {weekday} {month} {day} {hour}
    """,
    "GREETING": """
        Happy Birthday {first}; Happy {nth} {first}; Welcome Home {first}; Congrats {first};
        Good Luck {first}; Best {role} Ever; Get Well {first}; Thank You {first};
        {first} Turns {n}; Sweet {n}; Happy {weekday}; Happy Birthday {first} and {first};
        Welcome to the {surname} Family
    """,
    "PRODUCT": """
        {adjective} {fruit} {product}; {fruit} and {fruit}; {surname} {product};
        {place} {product}; {fruit} {product}; Pure {fruit}; {adjective} {product};
        {animal} Brand {product}; {first} Home Made {product};
        {adjective} {fruit} and {fruit} {product}; {surname} {fruit} and {fruit} {product}
    """,
    "NUMBER": """
        {n}; {number}; Room {number}; Number {n}; Bay {letter}{n}; Team {n}; Box {number};
        {letter}{letter} {number}; Unit {letter}{letter}{n}; Sector {n}; {noun} {n}
    """,
    "NAME": """
        {first}; {first} {surname}; Captain {surname}; Miss {first}; {surname} {n};
        Doctor {surname}; Coach {first}; Professor {first} {surname}
    """,
    "VESSEL": """
        {adjective} {animal}; Spirit of {place}; {colour} {noun}; {place} Express;
        {surname} {trade}; {place} {trade}; {adjective} {trade}; Line {n} {place}; {noun} Runner;
        {surname} and {surname} {trade}; {adjective} {animal} of {place}
    """,
    "MOTTO": """
        {abstract} and {abstract}; {abstract} Above {abstract}; {verb} With {abstract};
        In {abstract} We Trust; {abstract} Before {abstract}; Through {abstract} to {abstract};
        {abstract} Endures; By {noun} and {noun}; {abstract} for All;
        {abstract} {abstract} and {abstract}; {verb} With {abstract} and {abstract}
    """,
    "MEMORY": """
        For {first} With Love; {first} and {first}; {first} and {first} {year};
        In Memory of {first}; {surname} {year}; Always Yours {first}; To {first} From {first};
        {surname} Family {year}; Gift of {first} {surname};
        In Loving Memory of {first} {surname}; {first} and {first} {month} {year}
    """,
    "MESSAGE": """
        Call {first}; Buy {food} and {food}; {first} Was Here; Do Not Forget {food};
        I Love {place}; See You {weekday}; Back at {hour}; Meet Me at {hour}; Feed the {animal};
        Ask {first} About {food}; Miss You {first}; Water the {plural}; Test on {weekday};
        Dinner at {hour}; Meet {first} at the {noun} at {hour}; Buy {food} and {food} for {first}
    """,
    "LEGEND": """
        {spell} of {abstract}; {noun} of the {animal}; Beware the {animal}; Here Be {beast};
        Kingdom of {realm}; {realm} Awaits; {spell} of the {adjective}; Enter {realm};
        Tears of {realm}; The {colour} {spell}; Project {realm}; Only the {adjective};
        Model {letter}{letter}{number}; {noun} of the {adjective} {animal};
        {spell} of the {adjective} {animal}
    """,
}

LETTERING = """
    in bold block letters; in elegant gold script; in hand-painted letters;
    in large white capitals; in neat cursive writing; in glowing blue letters;
    in thick black strokes; in rounded red lettering; in crisp modern type;
    in faded vintage lettering; in bright yellow letters; in slender silver type;
    in playful colorful letters; in tall narrow letters; in heavy stenciled letters;
    in smooth green lettering; with each letter clearly legible; across its whole width
"""

STYLE = """
    a realistic photograph of; a close-up photograph of; a wide-angle shot of;
    a detailed illustration of; a cinematic still of; a watercolor painting of;
    an oil painting of; a vintage photograph of; a digital painting of; a sharp product photo of;
    a low-angle view of; a candid snapshot of; a studio photograph of; a pencil drawing of;
    a retro poster-style image of; a film photograph of
"""

LIGHT = """
    under soft morning light; at golden hour; under a clear blue sky;
    in the warm glow of lanterns; under heavy gray clouds; lit by a single lamp;
    in gentle afternoon sunlight; on a misty evening; under bright studio lights;
    with long evening shadows; in cool blue twilight; with a shallow depth of field;
    in vivid saturated colors; with fine natural texture; with a softly blurred background;
    in muted earthy tones; with dramatic side lighting; in calm pastel colors;
    with raindrops glistening nearby; with dust drifting in a sunbeam
"""

MOOD = """
    calm and inviting; busy and cheerful; quiet and mysterious; nostalgic and warm;
    clean and modern; playful and colorful; solemn and still; lively and crowded;
    cozy and intimate; bright and spacious
"""

# theme: (kinds of text, carriers, how the text is on them, places)
SCENES: dict[str, tuple[str, str, str, str]] = {
    "street": ("NOTICE SHOP WAY SLOGAN PRICE NUMBER WORD DATE", """
        a weathered wooden signpost; a glowing neon sign; a hanging shop sign;
        a chalkboard stand; a large roadside billboard; a blue enamel street sign;
        a yellow warning sign; a striped shop awning; a cloth banner; a rusty metal sign;
        a lamp-lit bus stop board; a construction barrier; a wrought-iron gate sign
    """, """
        reading; displaying; showing the words; with the text; clearly marked; announcing
    """, """
        on a rainy city street; beside a quiet country road; outside a busy train station;
        in a narrow cobbled alley; at the edge of a pine forest; in front of a small cafe;
        near a crowded harbor; at a mountain crossroads; beside a suburban sidewalk;
        in a lively night market; at the entrance of a city park; next to an empty parking lot;
        above a corner bakery; along a sandy desert highway; beside a frozen lake
    """),
    "screen": ("STATUS TITLE NUMBER WAY DATE SLOGAN WORD", """
        a smartphone screen; an open laptop; an old arcade machine; a stadium scoreboard;
        an airport departure board; a cinema marquee; a slim smartwatch; a car dashboard display;
        an elevator panel; a studio television; a tablet on a stand; a retro computer monitor;
        a ticket machine; a digital alarm clock
    """, """
        displaying; flashing; showing the message; lit up with the words; showing;
        with a headline reading
    """, """
        on a cluttered desk; in a dim control room; inside a crowded terminal;
        in a neon-lit arcade; beside a half-empty coffee mug; in a modern office lobby;
        at the back of a classroom; in a quiet hospital corridor; next to a sleeping cat;
        on a bedside table; at a packed evening game; in a cozy living room; inside a subway car
    """),
    "print": ("TITLE SLOGAN DATE SHOP WAY PRICE", """
        a movie poster; a hardcover book; a folded newspaper; a glossy magazine;
        a vintage travel postcard; a vinyl album cover; a torn concert ticket;
        a leather-bound menu; a paper calendar; a comic book cover; a museum brochure;
        a theater playbill; a science fair poster; an illustrated map
    """, """
        titled; with the headline; printed with; bearing the title; with the large text; reading
    """, """
        pinned to a brick wall; on a marble cafe table; in a sunlit library;
        leaning against a window; in a small bookshop; on a crowded notice board;
        on a wooden kitchen counter; among scattered photographs; on a park bench;
        in a record store; beside a pair of reading glasses; on a velvet armchair
    """),
    "food": ("GREETING PRODUCT NAME PRICE WORD", """
        a frosted birthday cake; a cereal box; a glass jam jar; a paper coffee cup;
        a dark wine bottle; a giant sugar cookie; a round biscuit tin; a white bakery box;
        a soup can; a wooden crate of fruit; a wrapped chocolate bar; a ceramic mug;
        a tall ice cream sundae with a paper flag
    """, """
        decorated with; labeled; with the words; stamped with; with a label reading;
        lettered with
    """, """
        on a checkered tablecloth; in a rustic farmhouse kitchen; on a bakery counter;
        at a summer picnic; on a supermarket shelf; beside a vase of fresh flowers;
        on a polished bar; at a garden party; in a warm cafe corner;
        among spilled flour and spoons; on a silver tray; at a farmers market stall
    """),
    "cloth": ("SLOGAN NAME NUMBER WORD MOTTO GREETING", """
        a plain cotton shirt; a blue baseball cap; a knitted wool scarf; a canvas tote bag;
        a striped kitchen apron; an embroidered pillow; a runner bib; a hockey jersey;
        a silk flag; a denim jacket patch; a red woolen sweater; a child-sized backpack
    """, """
        printed with; embroidered with; stitched with the words; featuring the text; reading;
        with a patch reading
    """, """
        hanging on a clothesline; folded on a bed; worn by a smiling dancer; on a shop mannequin;
        in a school locker room; worn by a marathon runner; on a wooden rocking chair;
        at a craft fair; draped over a bicycle; in a tailor workshop; worn by a street musician;
        on a sandy beach towel
    """),
    "handwritten": ("MESSAGE WORD GREETING SLOGAN NAME", """
        a yellow sticky note; a classroom blackboard; an office whiteboard; a folded love letter;
        a strip of wet sand; a frosted window; a graffiti-covered wall; an open diary page;
        a chalk drawing on the pavement; a torn shopping list; a message in a bottle;
        a cardboard sign
    """, """
        reading; with the handwritten words; saying; with the scrawled message; that simply says;
        showing the words
    """, """
        in a cluttered kitchen; on a refrigerator door; in an empty classroom;
        at the edge of the waves; in an attic bedroom; beneath a railway bridge;
        on a messy studio desk; beside a steaming cup of tea; on a snowy windowsill;
        in a skate park; outside a school gate; next to a bowl of oranges
    """),
    "legend": ("LEGEND MOTTO TITLE WORD NUMBER", """
        an unrolled parchment scroll; a thick spellbook; a battered robot;
        a towering castle gate; a swirling potion bottle; an iron-bound treasure chest;
        a knight shield; an alien control console; a crystal tablet; a pirate flag;
        a dwarven forge sign; a floating holographic panel
    """, """
        inscribed with; bearing the words; revealing the text; marked with the words;
        with runes that spell; glowing with the words
    """, """
        in a candlelit tower; in a ruined temple; on a distant red planet;
        deep inside a crystal cave; in an enchanted forest; aboard a ghostly galleon;
        in a floating city; on a stormy battlefield; in an underground laboratory;
        at the gates of a desert citadel; in a snowbound monastery; beneath a shattered moon
    """),
    "vehicle": ("VESSEL NUMBER SLOGAN NAME WAY SHOP", """
        a delivery van; a red fire engine; a racing car; a city tram; a school bus; a food truck;
        a rusty pickup truck; a vintage taxi; a long-haul truck; a camper van
    """, """
        painted with; with its side reading; marked; bearing the name; decorated with the words;
        lettered with
    """, """
        crossing a long stone bridge; parked outside a warehouse; on a steep city street;
        in a snowy mountain valley; under a starry sky; on a dusty farm track;
        in a bright repair garage; stuck in evening traffic; beside a field of sunflowers;
        on a winding coastal road; in front of a row of brick houses;
        on wet pavement at a crossing
    """),
    "boat": ("VESSEL NUMBER SLOGAN NAME WAY SHOP", """
        a white sailboat; a wooden fishing boat; a yellow submarine; a river ferry;
        a sturdy tugboat; an old steamship; a racing canoe
    """, """
        painted with; with its side reading; marked; bearing the name; decorated with the words;
        lettered with
    """, """
        in a calm turquoise bay; at a seaside pier; moored in a crowded harbor; on a foggy river;
        in choppy open water; beneath white cliffs; under a starry sky; beside a lighthouse;
        off a tropical island
    """),
    "flyer": ("VESSEL NUMBER SLOGAN NAME WAY SHOP", """
        a striped hot air balloon; a gleaming spaceship; a small propeller plane;
        a silver airship; a tall rocket; a white glider
    """, """
        painted with; with its side reading; marked; bearing the name; decorated with the words;
        lettered with
    """, """
        drifting above green hills; high above the clouds; against a pink evening sky;
        over a sleeping city; on a wide airfield; above a snowy mountain range;
        inside a vast hangar; above a desert canyon
    """),
    "stone": ("MOTTO MEMORY DATE NAME NUMBER WORD", """
        a polished brass plaque; a mossy gravestone; a stone archway; a park bench plate;
        a marble pedestal; a carved oak door; a granite milestone; a bronze memorial tablet
    """, """
        engraved with; inscribed with the words; etched with; bearing the inscription;
        carved with; with an engraving that reads
    """, """
        in a quiet courtyard; beneath a spreading oak; beside a reflecting pool;
        in an overgrown garden; in a silent cemetery; on a windy hilltop;
        at the edge of an old cloister; in a town square
    """),
    "keepsake": ("MOTTO MEMORY DATE NAME NUMBER WORD", """
        a silver ring; an antique pocket watch; a tall golden trophy; an old bronze bell;
        a steel sword blade; a dog collar tag; a heart-shaped locket; a pewter tankard
    """, """
        engraved with; inscribed with the words; etched with; bearing the inscription;
        carved with; with an engraving that reads
    """, """
        on a velvet cushion; on a dusty antique shelf; in a museum display case;
        on a mantelpiece; on a jeweler workbench; beside an old photograph; in a castle hall;
        on a dark wooden table
    """),
}

WORDS: dict[str, str] = {  # words between spaces; _ stands for a space in one
    "short": """
        Go Hi On Up Yes Now Joy Zen Run Sky Wow Sun Fun Art Ice Tea Hope Open Love Cozy Dawn Echo
        Fuel Glow Home Idea Jazz Kind Luck Moon Nova Opal Pure Rise Soul Tide Unity Vivid Wild
        Bloom Brave Candy Dream Faith Green Happy Karma Laugh Magic Ocean Peace Quiet Relax Smile
    """,
    "shout": """
        Action Begin Breathe Closed Danger Discover Explore Focus Freedom Genius Hello Imagine
        Inspire Journey Launch Legend Listen Magic Mystery Onward Paradise Patience Remember
        Shine Splash Surprise Thunder Together Victory Wander Welcome Wonder Zigzag
    """,
    "adjective": """
        Ancient Brave Bright Broken Calm Clever Cosmic Crimson Crooked Curious Daring Distant
        Eager Electric Empty Endless Faithful Final Floating Forgotten Frozen Gentle Giant Golden
        Grand Hidden Hollow Humble Hungry Little Lonely Lost Lucky Mighty Modern Northern Noble
        Old Patient Perfect Polite Proud Quiet Rapid Restless Royal Rustic Sacred Secret Silent
        Silver Simple Sleepy Southern Spicy Steady Stolen Strange Sunny Swift Tiny Velvet
        Wandering Wild Winter Wooden Young
    """,
    "noun": """
        Anchor Arrow Bell Bridge Candle Canyon Castle Clock Cloud Comet Compass Crown Desert
        Dream Echo Ember Engine Feather Fire Forest Fountain Garden Gate Ghost Harbor Hammer Hill
        House Island Jewel Journey Key Kettle Kingdom Ladder Lamp Lantern Letter Library
        Lighthouse Machine Map Meadow Mirror Moon Mountain Needle Night Ocean Orchard Painter
        Palace Paper Path Pearl Piano Pilot Pocket Prairie River Road Rocket Rose Sailor Shadow
        Shore Signal Sky Song Star Station Stone Storm Summer Sun Thread Tower Train Valley
        Violin Voyage Wave Whisper Willow Wind Window Wish
    """,
    "plural": """
        Apples Bees Bicycles Books Bridges Candles Clouds Crayons Dragons Dreams Feathers Flowers
        Forests Gardens Guitars Islands Kites Lanterns Letters Mountains Oceans Pancakes Penguins
        Pianos Pirates Planets Poems Puppies Puzzles Rivers Robots Rockets Seeds Shells Songs
        Spoons Stars Stories Turtles Umbrellas Whales Windows Wolves
    """,
    "verb": """
        Believe Build Climb Create Cycle Dance Discover Dive Dream Drive Explore Fly Follow Grow
        Hike Imagine Jump Laugh Lead Learn Listen Love Paint Plant Play Read Ride Roam Run Sail
        Sing Skate Sleep Smile Soar Surf Swim Teach Think Travel Wander Write
    """,
    "adverb": """
        Again Always Bravely Daily Deeply Farther Fearlessly Forever Freely Gently Higher Kindly
        Loudly More Often Outside Quietly Slowly Softly Together Today Tonight Twice Wisely
    """,
    "abstract": """
        Balance Beauty Courage Duty Faith Fortune Freedom Friendship Glory Grace Harmony Honor
        Hope Humor Joy Justice Kindness Knowledge Liberty Light Love Loyalty Memory Mercy Order
        Passion Patience Peace Power Pride Progress Reason Silence Strength Time Trust Truth
        Unity Valor Victory Virtue Wisdom Wonder
    """,
    "animal": """
        Badger Bear Beaver Camel Cat Crane Crow Deer Dolphin Dragon Eagle Elephant Falcon Finch
        Fox Frog Goose Hare Hawk Hedgehog Heron Horse Kraken Lion Lizard Lynx Magpie Mole Moose
        Otter Owl Panther Peacock Pelican Penguin Phoenix Rabbit Raven Robin Salmon Seal Serpent
        Sparrow Stag Swan Tiger Turtle Unicorn Walrus Whale Wolf
    """,
    "beast": """
        Bears Bees Crocodiles Dragons Geese Ghosts Giants Goblins Lions Monsters Ogres Serpents
        Sharks Snakes Trolls Witches Wolves
    """,
    "colour": """
        Amber Black Blue Copper Coral Crimson Emerald Golden Gray Green Indigo Ivory Jade Orange
        Purple Red Ruby Scarlet Silver Violet White Yellow
    """,
    "first": """
        Ada Alex Alice Amir Anna Ben Bruno Carla Chloe Clara Daniel David Diego Elena Ella Emil
        Emma Eva Felix Fiona Frank Grace Hanna Henry Hugo Ida Iris Ivan Jack James Jane Jonas
        Julia Kai Karl Kate Lara Leo Lena Liam Lily Lucas Lucy Maria Marco Martin Maya Mia Mila
        Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Priya Quinn Rosa Ruby Ruth Sam Sara
        Simon Sofia Tara Theo Thomas Tim Uma Vera Victor Wendy Yara Yusuf Zoe
    """,
    "surname": """
        Abbott Baker Barnes Bennett Brooks Carter Chen Clark Cooper Diaz Ellis Evans Fisher
        Fleming Foster Garcia Gibson Grant Hansen Harper Hayes Hughes Ito Jensen Keller Kim Lopez
        Marlow Mason Mercer Miller Moreno Morgan Nolan Novak Okafor Olsen Parker Patel Quincy
        Reyes Rossi Sato Shaw Silva Stone Turner Vargas Walker Weber Wells Winter Young
    """,
    "place": """
        Alder_Bay Amber_Falls Ashford Aspen Avalon Berlin Birch_Hill Boston Brighton Cairo
        Cedar_Creek Chicago Copper_Ridge Denver Dover Dublin Eagle_Rock Elm_Park Fern_Hollow
        Florence Geneva Glasgow Granite_Pass Havana Hazelton Helsinki Iron_Lake Jasper Kyoto
        Lagos Lakeside Lima Lisbon London Madrid Maple_Grove Marble_Arch Milan Nairobi Naples
        New_Haven Nora_Springs Oakland Oslo Otter_Creek Paris Pine_Valley Prague Quebec
        Raven_Point Rome Salem Santa_Rosa Seattle Silver_Lake Stone_Harbor Sydney Tokyo Vienna
        Westport Willow_Bend Zurich
    """,
    "shop": """
        Antiques Bakery Barbers Books Boutique Brewery Butchers Cafe Cinema Clinic Coffee
        Creamery Deli Diner Florist Gallery Garage Grill Hardware Hotel Inn Jewelers Kitchen
        Laundry Market Motors Music Noodles Optics Pharmacy Pizza Repairs Salon Shoes Studio
        Tailors Tavern Theater Toys
    """,
    "trade": """
        Airways Brothers Cargo Construction Electric Express Farms Ferries Freight Gardens Lines
        Logistics Movers Plumbing Racing Rail Rescue Robotics Shipping Tours Transport
    """,
    "product": """
        Biscuits Bread Butter Chips Chocolate Cider Coffee Cookies Cream Granola Honey Jam Juice
        Lemonade Marmalade Mustard Noodles Oats Pickles Salsa Sauce Soap Soda Soup Syrup Tea
        Toffee Vinegar Yogurt
    """,
    "fruit": """
        Almond Apple Apricot Banana Berry Cherry Cinnamon Coconut Cranberry Fig Ginger Grape
        Hazelnut Honey Lemon Lime Mango Maple Melon Mint Olive Orange Papaya Peach Peanut Pear
        Pepper Plum Pumpkin Raspberry Rosemary Tomato Vanilla Walnut
    """,
    "food": """
        Apples Bagels Bananas Beans Berries Bread Burgers Cakes Carrots Cheese Cherries Coffee
        Cookies Donuts Eggs Fries Grapes Honey Lemons Milk Muffins Mushrooms Noodles Onions
        Oranges Pancakes Peaches Pears Pizza Plums Popcorn Pretzels Pumpkins Rice Salad
        Sandwiches Soup Tacos Tea Tomatoes Waffles
    """,
    "gerund": """
        Biking Camping Climbing Cooking Cycling Dancing Diving Drinking Eating Fishing Hunting
        Jogging Jumping Littering Parking Reading Running Sailing Shouting Singing Skating
        Sleeping Smoking Swimming Talking Trading Whistling
    """,
    "please": """
        Be_Quiet Be_Seated Close_the_Gate Do_Not_Touch Drive_Slowly Feed_the_Ducks Form_a_Line
        Keep_Out Knock_Twice Mind_the_Step Pay_Here Recycle Remove_Shoes Ring_the_Bell Save_Water
        Stay_Calm Take_a_Seat Turn_Left Use_Stairs Wait_Here Wash_Hands Watch_Your_Head
    """,
    "keep": """
        Away Calm Clear Dry Frozen It_Simple It_Wild Left Moving Off_the_Grass Out Quiet Right
        Smiling Walking
    """,
    "crew": """
        Artists Cyclists Drivers Employees Guests Members Pilots Players Sailors Staff Students
        Teachers Visitors
    """,
    "delay": """
        Arriving Boarding Canceled Closed Delayed Diverted Full Landed Late Offline On_Time
        Online Paused Ready Restored Running
    """,
    "role": """
        Aunt Baker Boss Brother Captain Coach Cook Dad Doctor Driver Farmer Friend Grandma
        Grandpa Mom Neighbor Nurse Pilot Sister Teacher Uncle
    """,
    "spell": """
        Book Chronicle Circle Crown Curse Gate Oath Order Prophecy Riddle Scroll Shield Sword
        Tale Throne Trial Tomb Wand
    """,
    "realm": """
        Aldoria Avenor Belmora Corvane Drakmoor Eldoria Fenwick Galadorn Ironhold Kaldor Lunaria
        Mirefall Nethria Orinth Ravenmoor Solara Tarvos Umbria Valdris Zephyria
    """,
    "month": """
        January February March April May June July August September October November December
    """,
    "season": """
        Spring Summer Autumn Winter
    """,
    "weekday": """
        Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """,
    "nth": """
        1st 5th 7th 10th 16th 18th 20th 21st 25th 30th 40th 50th 60th 70th 75th 80th 90th
    """,
    "letter": """
        A B C D E F G H J K L M N P R S T V W X Z
    """,
    "percent": """
        5 10 15 20 25 30 40 50 60 75 80 90
    """,
    "n": " ".join(map(str, range(2, 100))),
    "number": " ".join(map(str, range(101, 1000))),
    "day": " ".join(map(str, range(1, 31))),
    "year": " ".join(map(str, range(1880, 2090))),
    "hour": " ".join(f"{hour}_{half}" for half in ("AM", "PM") for hour in range(1, 13)),
}
# fmt: on
